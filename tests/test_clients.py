"""Three real clients against a real server: chat, streams, tools and JSON, as their pages show it.

Each is installed into an environment of its own, which needs the Python package index and some
minutes, so it is run by hand:

    python -m pytest -n0 -m network tests/test_clients.py
"""

import re
import subprocess
import sys

import pytest
from conftest import ROOT
from started import serving

HEAD = """
import json, sys
url, model = sys.argv[1:]
city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}
city |= {"required": ["city"], "additionalProperties": False}
hello = [{"role": "user", "content": "Say hello."}]
asked = {"role": "user", "content": "What is the weather in Paris?"}
"""
ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages
fields = dict(model=model, max_tokens=64, extra_body={"temperature": 0})
answer = client.create(system="Be brief.", messages=hello, **fields)
assert answer.content[0].text and 0 < answer.usage.output_tokens <= 64 and answer._request_id
with client.stream(messages=hello, **fields) as events:
    text = "".join(events.text_stream)
    assert text and events.get_final_message().content[0].text == text
tools = [{"name": "weather", "description": "of a city", "input_schema": city}]
first = client.create(messages=[asked], tools=tools, tool_choice={"type": "any"}, **fields)
use = next(block for block in first.content if block.type == "tool_use")
assert first.stop_reason == "tool_use" and "city" in use.input
result = {"type": "tool_result", "tool_use_id": use.id, "content": "18"}
said = [asked, {"role": "assistant", "content": first.content}]
said.append({"role": "user", "content": [result]})
last = client.create(messages=said, tools=tools, tool_choice={"type": "none"}, **fields)
assert last.content[0].text
assert client.count_tokens(model=model, messages=hello).input_tokens > 0
"""
LANGCHAIN = """
from langchain_openai import ChatOpenAI
llm = ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, temperature=0, max_tokens=64)
answer = llm.invoke("Say hello.")
assert answer.content and answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in llm.stream("Say hello.")) == answer.content
assert len(llm.batch(["Say hello.", "Say goodbye."])) == 2
tool = {"type": "function", "function": {"name": "weather", "parameters": city}}
assert llm.bind_tools([tool], tool_choice="weather").invoke([asked]).tool_calls[0]["args"]["city"]
place = {"title": "place", **city}
llm = llm.with_structured_output(place, method="json_schema")
assert llm.invoke("Where is the Louvre?")["city"]
"""
# What README shows; more of this client is in test_openai.py, as it is installed here, too.
SHOWN = re.findall(r"^```py\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
OPENAI = "".join(SHOWN).replace('"http://127.0.0.1:5000/v1"', 'url + "/v1"')
CLIENTS = {"openai": OPENAI, "anthropic": ANTHROPIC, "langchain-openai": LANGCHAIN}


@pytest.fixture(scope="module")
def smollm2():
    with serving("--model", "smollm2") as server:
        yield server


@pytest.mark.network
@pytest.mark.parametrize("package", CLIENTS)
def test_a_client_does_what_its_documentation_shows(package, smollm2, tmp_path):
    python = str(tmp_path / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
    limits = str(ROOT / "requirements.txt")
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", limits, package], check=True)
    url = f"http://127.0.0.1:{smollm2.port}"
    subprocess.run([python, "-c", HEAD + CLIENTS[package], url, "smollm2"], check=True)
