"""`python -m bench.echo http|grpc PORT`: the least that a server of that library does between a request and an answer.

It reads the request, looks at nothing, and sends one prepared answer to an infer request for the model that
`bench.compare_triton` uses: the floor of a gateway on the same library. Says "ready", ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

ANSWER = b'{"model_name":"identity","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,256]}]}'


async def serve_http(port: int) -> None:
    from aiohttp import web

    async def answer(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response(body=ANSWER, content_type="application/json")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()


async def serve_grpc(port: int) -> object:
    import grpc
    from tritonclient.grpc import service_pb2

    canned = service_pb2.ModelInferResponse(model_name="identity", model_version="1", raw_output_contents=[b""])
    canned.outputs.add(name="y", datatype="FP32", shape=[1, 256])
    bytes_ = canned.SerializeToString()

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return bytes_

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


async def main(kind: str, port: int) -> None:
    kept = await (serve_http(port) if kind == "http" else serve_grpc(port))
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    del kept


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
