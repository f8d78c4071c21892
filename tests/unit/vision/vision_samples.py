"""Pictures in every dress, and a server that hands them out by a script."""

import base64
import io
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image


def picture(width=30, height=20, seed=0):
    """RGB noise: a wrong pixel changes it."""
    import random

    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


def file_of(image, kind="PNG", **options):
    """The bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(image):
    return "data:image/png;base64," + base64.b64encode(file_of(image)).decode()


class ImageServer:
    """``/picture`` the image, ``/moved/N`` redirected N times, ``/file`` sent to a file of this machine,
    ``/large`` endless, ``/slow`` byte by byte, else 404."""

    def __init__(self, image):
        body = file_of(image)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                kind, _, number = self.path.strip("/").partition("/")
                if kind == "moved" and int(number):
                    self.send_response(302)
                    self.send_header("Location", f"/moved/{int(number) - 1}")
                    self.end_headers()
                elif kind == "file":
                    self.send_response(302)
                    self.send_header("Location", "file:///etc/hostname")
                    self.end_headers()
                elif kind in ("picture", "moved"):
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(body)
                elif kind in ("large", "slow"):
                    self.send_response(200)
                    self.end_headers()
                    try:
                        for _ in range(1000):
                            self.wfile.write(b"x" * (65536 if kind == "large" else 1))
                            self.wfile.flush()
                            time.sleep(0 if kind == "large" else 0.05)
                    except OSError:
                        pass  # the client has seen enough
                else:
                    self.send_error(404)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
