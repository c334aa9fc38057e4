"""A session and its neighbours: what a client sends costs only itself. Real sockets, one process, one loop."""

import os

from shm.messages import GetModel, RegisterPool, encode
from tests.unit.test_sessions import session_test


@session_test
async def test_descriptors_of_a_first_message_that_is_not_hello_are_closed(service, sessions, connect):
    client = connect()
    read, write = os.pipe2(os.O_NONBLOCK)
    client.send_raw(encode(RegisterPool(id=1, name="r", byte_size=1)), [write] * 16)
    assert (await client.receive())["message"] == "the first message must be Hello"
    assert (await client.receive())["type"] == "Goodbye"
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)


@session_test
async def test_a_flood_of_one_client_is_not_served_ahead_of_the_others(service, sessions, connect):
    flood, neighbour = connect(), connect()
    await flood.greet()
    await neighbour.greet()
    for number in range(2, 100):
        flood.send({"type": "ListRegions", "id": number})
    neighbour.send({"type": "GetModel", "id": 2, "model": "neighbour"})
    assert (await neighbour.receive())["id"] == 2
    ahead = [type(request) for request, _ in service.asked].index(GetModel)
    assert ahead <= 3, "it shares turns, whoever has sent more"
