"""A program that ends while threads that nobody waits for are amid waits: one always, one again and again."""

import threading
import time

import tcpx

server = tcpx.Endpoint("127.0.0.1:0")
accepted: list[tcpx.Connection] = []
accepting = threading.Thread(target=lambda: accepted.append(server.accept().wait()))
accepting.start()
client = tcpx.connect(server.pairing()).wait()
accepting.join()
window = accepted[0].expose(bytearray(1 << 22))


def get() -> None:
    while True:
        client.get(bytearray(1 << 22), window.key).wait()


for work in (get, lambda: accepted[0].notification().wait()):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
