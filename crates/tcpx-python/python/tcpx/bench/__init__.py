"""``python -m tcpx.bench``: figures beside those of others, on your own host.

``python -m tcpx.bench --peer program,nixl,mooncake,gloo`` compares sends, receives and puts from Python;
``python -m tcpx.bench nixl`` compares the backend ``TCPX`` of NIXL with UCX of the same wheel;
``python -m tcpx.bench targets`` runs of both what the project's targets are about, and says which are met.
"""
