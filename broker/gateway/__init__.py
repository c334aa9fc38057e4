"""The front ends: HTTP, gRPC, ZeroMQ and metrics, in processes of their own that act for principals.

    http · grpc · zmq (a codec and a server each) ─▶ kserve (the words) ─▶ service ─▶ clientlib ─▶ broker, workers

A gateway is expendable: what clients registered belongs to principals in the broker, not to it.
"""
