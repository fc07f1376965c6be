"""The teaching page: static files of this folder at /page/, nothing fetched from elsewhere.

It speaks to the server as any client does: POST /generate with stream and trace, GET /health.
"""

from pathlib import Path
from typing import Any

from flask import Flask, Response, redirect, send_from_directory

FOLDER = Path(__file__).parent
FILES = (".html", ".css", ".js", ".svg", ".json")
# Own scripts and styles only, none of them inline; nothing may frame the page.
POLICY = "; ".join(
    ["default-src 'none'"]
    + [f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")]
    + [f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")]
)


def register_page(app: Flask, prompts: dict[str, str]) -> None:
    """Serve the page, its files, and `prompts` by name to pick from."""

    def file(name: str) -> Response:
        """Send a file of this folder, with the headers that keep the page safe."""
        response = send_from_directory(FOLDER, name, max_age=0)
        if name == "index.html":  # and not from a folder of files, without this server
            html = (FOLDER / name).read_text("utf-8").replace("<html ", "<html data-server ", 1)
            response = Response(html, mimetype="text/html")
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    app.add_url_rule("/", view_func=lambda: redirect("page/"), endpoint="root")
    app.add_url_rule("/page/", view_func=lambda: file("index.html"), endpoint="page")
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in FILES:
            url = f"/page/{path.name}"
            app.add_url_rule(url, view_func=lambda n=path.name: file(n), endpoint=url[1:])

    @app.get("/prompts")
    def get_prompts() -> dict[str, Any]:
        """Send the prompts by name."""
        return {"prompts": prompts}
