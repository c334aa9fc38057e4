"""The loader process: the only part of the broker that reads `config.pbtxt` and model files.

It runs for the duration of one `LoadRequest` and may crash on a hostile file without harm. Nothing outside this
package imports it; the broker starts `python -m broker.repository.loader` and speaks `broker.repository.protocol`.
"""
