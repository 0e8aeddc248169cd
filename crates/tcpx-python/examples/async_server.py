"""A server that answers every request of every client, in one event loop.

    python async_server.py                        # prints a line, serves until Ctrl-C
    python async_server.py 'TCPX_KEY=... HOST:PORT'

A request is a message of up to 1 MiB; the answer is the same bytes in upper case.
"""

import asyncio
import sys

import tcpx

REQUEST, ANSWER = 1, 2


async def serve_client(connection: tcpx.Connection) -> None:
    buffer = bytearray(1 << 20)
    try:
        while True:
            # A client may think for as long as it likes.
            report = await connection.recv(buffer, REQUEST, stall=float("inf"))
            await connection.send(bytes(buffer[: report.nbytes]).upper(), ANSWER)
    except tcpx.Error as end:
        print(f"a client left: {end}", file=sys.stderr)


async def serve() -> None:
    with tcpx.Endpoint(":0") as server:
        print(server.pairing(), flush=True)
        clients = set()
        while True:
            connection = await server.accept()
            client = asyncio.create_task(serve_client(connection))
            clients.add(client)
            client.add_done_callback(clients.discard)


async def ask(line: str) -> None:
    async with tcpx.connect(line) as connection:
        for text in (b"hello", b"from", b"tcpx"):
            answer = bytearray(1 << 20)
            receive = connection.recv(answer, ANSWER)
            await connection.send(text, REQUEST)
            report = await receive
            print(bytes(answer[: report.nbytes]).decode())


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            asyncio.run(serve())
        case [line]:
            asyncio.run(ask(line))
        case _:
            sys.exit(__doc__)
