"""The program of an episode: hands the task, the policy's address and the key to the agent's service, and writes what it returns.

Only sockets are imported, so that an episode costs hundredths of a second. Its arguments: the service's port, the file to write.
"""

import json
import os
import socket
import sys

with open("row.json") as file:
    row = json.load(file)
task = json.dumps({**row, "base_url": os.environ["OPENAI_BASE_URL"], "key": os.environ["OPENAI_API_KEY"]}).encode()
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as service:
    head = f"POST / HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(task)}\r\n\r\n"
    service.sendall(head.encode() + task)
    reply = b"".join(iter(lambda: service.recv(65536), b""))
status, _, body = reply.partition(b"\r\n\r\n")
if b" 200 " not in status.split(b"\r\n")[0]:
    sys.exit(f"the agent's service failed: {reply.decode(errors='replace')[:300]}")  # no score: masked and counted
with open(sys.argv[2], "wb") as result:
    result.write(body)
