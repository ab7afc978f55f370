"""Run inside the rig with a bare Python: says hello to a control socket and prints the state that status shows."""

import socket
import struct
import sys

# {"type": "hello", "protocol": 1} and {"type": "request", "id": 1, "body": {"type": "status"}} as msgpack
HELLO = b"\x82\xa4type\xa5hello\xa8protocol\x01"
STATUS = b"\x83\xa4type\xa7request\xa2id\x01\xa4body\x81\xa4type\xa6status"


def read(file):
    header = file.read(4)
    return file.read(struct.unpack(">I", header)[0]) if len(header) == 4 else b""


with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(20)
    sock.connect(sys.argv[1])
    try:
        sock.sendall(b"".join(struct.pack(">I", len(frame)) + frame for frame in (HELLO, STATUS)))
        file = sock.makefile("rb")
        read(file)
        answer = read(file)
    except (BrokenPipeError, ConnectionResetError):
        answer = b""
# The value of the key "state" is a short msgpack string: one length byte, then its text.
at = answer.find(b"\xa5state")
print(answer[at + 7 : at + 7 + (answer[at + 6] & 0x1F)].decode() if at >= 0 else "")
