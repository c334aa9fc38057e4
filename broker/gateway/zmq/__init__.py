"""ZeroMQ: msgpack messages of the same requests. Started by `broker.gateway.process`."""
