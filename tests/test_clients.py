"""Clients in environments of their own, which need the package index and some minutes: by hand."""

import json
import sys

import clients
import pytest


def test_a_row_tells_what_passed_and_why_the_rest_did_not(tmp_path, monkeypatch):
    """No package is installed: the environment is ours, and the client asks nothing."""

    class Some(clients.Checks):
        package = "pytest"

        def passes(self):
            assert (self.url, self.model) == ("URL", "MODEL")

        def fails(self):
            raise RuntimeError("because\nof this")

    monkeypatch.setitem(clients.CLIENTS, "pytest", Some)
    found = clients.outcomes("pytest", "URL", "MODEL")
    assert found == {"passes": "", "fails": "RuntimeError: because of this"}
    monkeypatch.setattr(clients, "environment_of", lambda *_: (sys.executable, "1.0"))
    monkeypatch.setattr(clients, "run", lambda *_, **__: "noise\n" + json.dumps(found))
    row = clients.tried("pytest", "URL", "MODEL", tmp_path, False)
    assert (row["version"], row["passed"], row["total"]) == ("1.0", 1, 2)
    assert row["fails"] == {"fails": "RuntimeError: because of this"}


@pytest.mark.network
def test_every_client_does_what_its_documentation_shows(capfd):
    assert clients.main([]) == 0, capfd.readouterr().err
