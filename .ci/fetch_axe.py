"""Fetch axe-core, which judges the page's accessibility in the tests: .ci/axe.min.js.

It is an npm package, pinned by version and digest; npm itself is not needed for one file of it.
"""

import base64
import hashlib
import io
import tarfile
import urllib.request
from pathlib import Path

URL = "https://registry.npmjs.org/axe-core/-/axe-core-4.14.1.tgz"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="

with urllib.request.urlopen(URL, timeout=120) as answer:
    package = answer.read()
if base64.b64encode(hashlib.sha512(package).digest()).decode() != SHA512:
    raise SystemExit(f"{URL} is not the package that is pinned")
with tarfile.open(fileobj=io.BytesIO(package)) as files:
    file = files.extractfile("package/axe.min.js")
    Path(__file__).with_name("axe.min.js").write_bytes(file.read())
