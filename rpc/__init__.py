"""How processes of a run talk: sockets, CURVE security, the wire, requests with replies, publish/subscribe."""
