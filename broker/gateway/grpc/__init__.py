"""gRPC: KServe v2 with Triton's extensions, on grpc.aio. Started by `broker.gateway.process`."""
