"""Receives webhooks on 127.0.0.1 and verifies them: receive.py PORT, with the secret (whsec_...) in WEBHOOK_SECRET."""

from __future__ import annotations

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from standardwebhooks import Webhook, WebhookVerificationError


class PrintingReceiver(BaseHTTPRequestHandler):
    """Prints each event whose signature and time are right. An event may come twice: remember its webhook-id."""

    def do_POST(self) -> None:
        """Answer 204 to accept an event. After any other answer it is delivered again."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            event = Webhook(os.environ["WEBHOOK_SECRET"]).verify(body, dict(self.headers.items()))
        except WebhookVerificationError:
            self.send_response(401)
        else:
            print(event["type"], event["data"]["job_id"], flush=True)
            self.send_response(204)
        self.end_headers()


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[1])), PrintingReceiver).serve_forever()
