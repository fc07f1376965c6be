"""The teaching page: a static site of its own, served at /page/; nothing is fetched from elsewhere.

The page opens on runs that were recorded once (recordings/, written by export.py). Sent by our
server it asks that as any client does: POST ../generate with stream and trace, GET ../health. Any
other file server will do as well: then every answer is one of the recording's.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

from flask import Flask, Response, redirect, send_from_directory

from runtime.models.prompts import read_prompts

FOLDER = Path(__file__).parent
TASKS = FOLDER.parents[1] / "course" / "tasks"  # which may be deleted
INDEX = "index.html"
FILES = (".html", ".css", ".js", ".svg", ".json", ".woff2", ".txt")
# Own scripts, styles and fonts only, none of them inline; nothing may frame the page.
POLICY = "; ".join(
    ["default-src 'none'"]
    + [f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img", "font")]
    + [f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")]
)


def files() -> list[str]:
    """The page's files, as paths below its folder."""
    found = (path for path in FOLDER.rglob("*") if path.suffix in FILES)
    return sorted(path.relative_to(FOLDER).as_posix() for path in found)


def index(mark: str, recording: str | None = None) -> str:
    """index.html with a mark in its html tag, and with this recording in place of its own."""
    text = (FOLDER / INDEX).read_text("utf-8").replace("<html", f"<html {mark}", 1)
    if recording:
        text = re.sub('data-recording="[^"]*"', f'data-recording="{recording}"', text, count=1)
    return text


def tasks() -> dict[str, str]:
    """The course's tasks: names of files, by their paths below the page."""
    return {f"course/{path.name[0]}": path.name for path in sorted(TASKS.glob("[1-9]_*.py"))}


def register(app: Flask, service: Any) -> None:
    """Serve the page of this server's engine."""
    register_page(app, read_prompts(service.is_chat))


def register_page(app: Flask, prompts: dict[str, str], mark: str = "data-server") -> None:
    """Serve the page, its files, the course's tasks, and `prompts` by name to pick from.

    Chapters link to their tasks; in an export they only name them. With another `mark` than
    data-server the page asks for nothing, and shows its recording.
    """
    page = index(mark)
    for url, name in tasks().items():
        path = f"<code>course/tasks/{name}</code>"
        page = page.replace(path, f'<a href="{url}">{path}</a>')

    def send(name: str, folder: Path = FOLDER) -> Response:
        """Send a file of a folder, with the headers that keep the page safe."""
        if name == INDEX:
            response = Response(page, mimetype="text/html")
        else:
            kind = "text/plain" if folder == TASKS else None  # by its name
            response = send_from_directory(folder, name, mimetype=kind, max_age=0)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    # Relative: behind a proxy these paths may begin with more.
    app.add_url_rule("/", view_func=lambda: redirect("page/"), endpoint="page")
    for url, name in {"": INDEX, **{name: name for name in files()}}.items():
        rule = f"/page/{url}"
        app.add_url_rule(rule, view_func=partial(send, name), endpoint=rule[1:])
    for url, name in tasks().items():
        app.add_url_rule(f"/page/{url}", view_func=partial(send, name, TASKS), endpoint=url)

    @app.get("/prompts")
    def get_prompts() -> dict[str, Any]:
        """Send the prompts by name."""
        return {"prompts": prompts}
