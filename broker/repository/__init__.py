"""Model repository: what models there are and how they are configured, as plain data.

`config` holds the types that cross process boundaries; `loader` is the only part that imports protobuf and onnx,
and it runs in a short-lived process of its own.
"""
