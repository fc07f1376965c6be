"""The teaching page: static files of this folder at /, nothing fetched from elsewhere.

The page opens on a story, a run of smollm2 that was recorded once (stored_story.json). Later it
speaks to the server as any client does: POST /generate with stream and trace, GET /health.
"""

from pathlib import Path
from typing import Any

from flask import Flask, Response, send_from_directory

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
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    app.add_url_rule("/", view_func=lambda: file("index.html"), endpoint="page")
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in FILES:
            url = f"/page/{path.name}"
            app.add_url_rule(url, view_func=lambda n=path.name: file(n), endpoint=url[1:])

    @app.get("/prompts")
    def get_prompts() -> dict[str, Any]:
        """Send the prompts by name."""
        return {"prompts": prompts}
