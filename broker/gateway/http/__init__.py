"""HTTP: KServe v2 with Triton's extensions, on asyncio. Started by `broker.gateway.process`."""
