"""A small router on loopback that opens ports by UPnP: it answers searches, and the calls that miniupnpc makes."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

_GROUP: Final = "239.255.255.250"
_SEARCH_PORT: Final = 1900
_KIND: Final = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
_SERVICE: Final = """<serviceList><service><serviceType>urn:schemas-upnp-org:service:{0}:1</serviceType>
<serviceId>urn:upnp-org:serviceId:{0}</serviceId><SCPDURL>/{0}</SCPDURL><controlURL>/{0}</controlURL>
<eventSubURL>/{0}</eventSubURL></service></serviceList>"""
_DEVICE: Final = "<device><deviceType>{}</deviceType>{}</device>"
_WAN: Final = "urn:schemas-upnp-org:device:WANDevice:1"
_CONNECTION: Final = _DEVICE.format(
    "urn:schemas-upnp-org:device:WANConnectionDevice:1", _SERVICE.format("WANIPConnection")
)
_INSIDE: Final = _DEVICE.format(
    _WAN, _SERVICE.format("WANCommonInterfaceConfig") + f"<deviceList>{_CONNECTION}</deviceList>"
)
_DESCRIPTION: Final = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">
{_DEVICE.format(_KIND, f"<deviceList>{_INSIDE}</deviceList>")}</root>"""


@dataclass
class UpnpRouter:
    """What the router was asked, and how it answers."""

    outside: str = "8.8.4.4"
    leases: bool = True
    opens: bool = True
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By outer port: the inner one, and the seconds of the lease."""

    def answer(self, action: str, body: str) -> str | None:
        """Return the fields of the answer, None for a refusal."""
        values = dict(re.findall(r"<New(\w+)>([^<]*)</New", body))
        if action == "AddPortMapping":
            lease_s = int(values["LeaseDuration"])
            if not self.opens or (lease_s and not self.leases):
                return None
            self.mapped[int(values["ExternalPort"])] = (int(values["InternalPort"]), lease_s)
        elif action == "DeletePortMapping":
            self.mapped.pop(int(values["ExternalPort"]), None)
        return {
            "GetStatusInfo": "<NewConnectionStatus>Connected</NewConnectionStatus><NewUptime>1</NewUptime>",
            "GetExternalIPAddress": f"<NewExternalIPAddress>{self.outside}</NewExternalIPAddress>",
        }.get(action, "")


@contextmanager
def serving(router: UpnpRouter) -> Iterator[None]:
    """Run the router inside the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(router)) as web, _search_socket() as search:
        page, ended = f"http://127.0.0.1:{web.server_address[1]}/", threading.Event()
        tasks = [
            threading.Thread(target=web.serve_forever, args=(0.02,)),
            threading.Thread(target=_be_found, args=(search, page, ended)),
        ]
        for task in tasks:
            task.start()
        try:
            yield
        finally:
            ended.set()
            web.shutdown()
            for task in tasks:
                task.join()


def _handler(router: UpnpRouter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, _DESCRIPTION)

        def do_POST(self) -> None:
            action = self.headers["SOAPAction"].strip('"').rpartition("#")[2]
            found = router.answer(action, self.rfile.read(int(self.headers["Content-Length"])).decode())
            kind = "urn:schemas-upnp-org:service:WANIPConnection:1"
            inner = f'<u:{action}Response xmlns:u="{kind}">{found}</u:{action}Response>'
            if found is None:
                inner = "<s:Fault><detail><UPnPError><errorCode>725</errorCode></UPnPError></detail></s:Fault>"
            envelope = '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/">'
            self._send(500 if found is None else 200, f"{envelope}<s:Body>{inner}</s:Body></s:Envelope>")

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    return Handler


def _search_socket() -> socket.socket:
    search = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    search.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    search.bind((_GROUP, _SEARCH_PORT))
    group = socket.inet_aton(_GROUP) + socket.inet_aton("127.0.0.1")
    search.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
    search.settimeout(0.05)
    return search


def _be_found(search: socket.socket, page: str, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            asked, sender = search.recvfrom(2048)
        except TimeoutError:
            continue
        if _KIND.encode() in asked:
            found = f"HTTP/1.1 200 OK\r\nST: {_KIND}\r\nUSN: uuid:1::{_KIND}\r\nLOCATION: {page}\r\n\r\n"
            search.sendto(found.encode(), sender)
