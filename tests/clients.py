"""Real clients, each installed into an environment of its own, against a real server.

Each client does what its documentation shows: chat, streams, tools, output by schema, and what else
it is for. A check passes if the client is content; of texts it asks only what the server promises.

    python -m tests.clients [--folder DIR] [--model smollm2] [--only CLIENT …] [--fresh]

This prints the table of clients for docs/api.md, to stderr why checks fail, and last a line of
JSON. The environments need the Python package index, once, and 4 GB in FOLDER.

A client's checks run in its own environment, where this file is a script: so it imports nothing of
this repository before `main`.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S = 1800  # for all checks of one client
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}
CITY |= {"required": ["city"], "additionalProperties": False}
WEATHER = {"name": "weather", "description": "the weather of a city", "parameters": CITY}
ASK, WHERE = "What is the weather in Paris?", "Where is the Louvre?"
HELLO = [{"role": "user", "content": "Say hello."}]


def run(command: list[str], **options: Any) -> str:
    """What a command prints. Raises RuntimeError with its last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)
    if done.returncode:
        raise RuntimeError(f"…{(done.stderr or done.stdout).strip()[-250:]}")
    return done.stdout


def place() -> Any:
    """A class with the schema of CITY."""
    import pydantic

    field = pydantic.Field(max_length=20)
    return pydantic.create_model("Place", __doc__="A place in the world.", city=(str, field))


class Checks:
    """The public methods of a subclass are the checks of one client, `package` what it needs."""

    package: str

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.v1 = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}

    @classmethod
    def names(cls) -> list[str]:
        return [name for name in vars(cls) if not name.startswith("_") and name != "package"]

    def _run(self, program: str, *arguments: str, **options: Any) -> str:
        """What a program of this environment prints."""
        return run([str(Path(sys.executable).with_name(program)), *arguments], **options)


class OpenAI(Checks):
    package = "openai"

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        import openai

        self._client = openai.OpenAI(**self.v1, timeout=300)
        self._responses = self._client.responses

    def _chat(self, **fields: Any) -> Any:
        fields = {"messages": HELLO, "max_tokens": 32, "temperature": 0} | fields
        return self._client.chat.completions.create(model=self.model, **fields)

    def chat(self) -> None:
        answer = self._chat(max_tokens=16)
        assert answer.choices[0].message.content and 0 < answer.usage.completion_tokens <= 16

    def stream(self) -> None:
        chunks = [*self._chat(stream=True, stream_options={"include_usage": True})]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == self._chat().choices[0].message.content
        assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices

    def tools(self) -> None:
        said: list[Any] = [{"role": "user", "content": ASK}]
        tools = [{"type": "function", "function": WEATHER}]
        first = self._chat(messages=said, tools=tools, tool_choice="required").choices[0]
        assert first.finish_reason == "tool_calls" and first.message.tool_calls
        said.append(first.message)
        for call in first.message.tool_calls:
            assert "city" in json.loads(call.function.arguments)
            said.append({"role": "tool", "tool_call_id": call.id, "content": "18 degrees"})
        last = self._chat(messages=said, tools=tools, tool_choice="none").choices[0].message
        assert last.content and not last.tool_calls

    def structured_output(self) -> None:
        fields = dict(model=self.model, messages=[{"role": "user", "content": WHERE}])
        answer = self._client.chat.completions.parse(**fields, response_format=place())
        assert answer.choices[0].message.parsed.city

    def logprobs(self) -> None:
        choice = self._chat(logprobs=True, top_logprobs=3).choices[0]
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
        text = "".join(token.token for token in choice.logprobs.content)
        assert text.startswith(choice.message.content)

    def list_of_prompts(self) -> None:
        prompts = ["1, 2, 3,", "a, b, c,"]
        fields = dict(model=self.model, temperature=0, max_tokens=8)
        both = self._client.completions.create(prompt=prompts, n=2, **fields).choices
        assert [choice.index for choice in both] == [0, 1, 2, 3]
        alone = self._client.completions.create(prompt=prompts[1], **fields).choices[0]
        assert both[2].text == both[3].text == alone.text

    def echo(self) -> None:
        fields = dict(model=self.model, prompt="1, 2, 3,", max_tokens=1, echo=True, logprobs=1)
        choice = self._client.completions.create(**fields).choices[0]
        assert choice.text.startswith("1, 2, 3,") and choice.logprobs.token_logprobs[0] is None

    def penalties_bias_and_n(self) -> None:
        fields = dict(presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"42": -100}, n=2)
        answer = self._chat(seed=1, stop=["zzz"], top_p=0.9, user="somebody", **fields)
        assert len(answer.choices) == 2

    def responses(self) -> None:
        fields = dict(instructions="Be brief.", input="Say hello.", max_output_tokens=16)
        answer = self._responses.create(model=self.model, **fields)
        assert answer.output_text and 0 < answer.usage.output_tokens <= 16

    def responses_stream(self) -> None:
        with self._responses.stream(model=self.model, input="Say hello.", temperature=0) as events:
            text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            assert text and events.get_final_response().output_text == text

    def responses_tools(self) -> None:
        tools = [{"type": "function", "strict": True, **WEATHER}]
        fields = dict(model=self.model, tools=tools, temperature=0, max_output_tokens=64)
        said: list[Any] = [{"role": "user", "content": ASK}]
        first = self._responses.create(input=said, tool_choice="required", **fields)
        call = next(item for item in first.output if item.type == "function_call")
        assert "city" in json.loads(call.arguments)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
        said += [*first.output, output]
        assert self._responses.create(input=said, tool_choice="none", **fields).output_text

    def responses_by_schema(self) -> None:
        answer = self._responses.parse(model=self.model, input=WHERE, text_format=place())
        assert answer.output_parsed.city

    def models_and_errors(self) -> None:
        import openai

        assert [entry.id for entry in self._client.models.list()] == [self.model]
        with suppress(openai.BadRequestError):
            self._chat(temperature=-1)
            raise AssertionError("a temperature below 0 was taken")


class Anthropic(Checks):
    package = "anthropic"

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        import anthropic

        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300)
        self._messages = client.messages
        self._fields = dict(model=model, max_tokens=64, extra_body={"temperature": 0})
        weather = {"name": "weather", "description": "of a city", "input_schema": CITY}
        self._tools = dict(tools=[weather], tool_choice={"type": "any"}, **self._fields)

    def messages(self) -> None:
        answer = self._messages.create(system="Be brief.", messages=HELLO, **self._fields)
        assert answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens")
        assert answer.usage.input_tokens > 0 and 0 < answer.usage.output_tokens <= 64

    def stream(self) -> None:
        with self._messages.stream(messages=HELLO, **self._fields) as events:
            text = "".join(events.text_stream)
            assert text and events.get_final_message().content[0].text == text

    def tools(self) -> None:
        said: list[Any] = [{"role": "user", "content": ASK}]
        first = self._messages.create(messages=said, **self._tools)
        use = next(block for block in first.content if block.type == "tool_use")
        assert first.stop_reason == "tool_use" and "city" in use.input
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees"}
        said += [dict(role="assistant", content=first.content), dict(role="user", content=[result])]
        fields = self._tools | {"tool_choice": {"type": "none"}}
        assert self._messages.create(messages=said, **fields).content[0].text

    def tools_stream(self) -> None:
        with self._messages.stream(messages=HELLO, **self._tools) as events:
            content = events.get_final_message().content
        assert any(block.type == "tool_use" and "city" in block.input for block in content)

    def count_tokens(self) -> None:
        count = self._messages.count_tokens(model=self.model, messages=HELLO).input_tokens
        usage = self._messages.create(messages=HELLO, **self._fields).usage
        created, read = usage.cache_creation_input_tokens, usage.cache_read_input_tokens
        assert count == usage.input_tokens + (created or 0) + (read or 0)


class LangChain(Checks):
    package = "langchain-openai"

    def _llm(self, **fields: Any) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(**self.v1, model=self.model, temperature=0, max_tokens=64, **fields)

    def invoke_stream_and_batch(self) -> None:
        llm = self._llm()
        answer = llm.invoke("Say hello.")
        assert answer.content and answer.usage_metadata["output_tokens"] > 0
        assert len(llm.batch(["Say hello.", "Say goodbye."])) == 2
        assert "".join(chunk.content for chunk in llm.stream("Say hello.")) == answer.content

    def bind_tools(self) -> None:
        from langchain_core.messages import HumanMessage, ToolMessage
        from langchain_core.tools import tool

        @tool
        def weather(city: str) -> str:
            """The weather of a city."""
            return "18 degrees"

        said: list[Any] = [HumanMessage(ASK)]
        answer = self._llm().bind_tools([weather], tool_choice="weather").invoke(said)
        call = answer.tool_calls[0]
        said += [answer, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
        assert self._llm().bind_tools([weather], tool_choice="none").invoke(said).content

    def with_structured_output(self) -> None:
        kind = place()
        for method in ("json_schema", "function_calling"):
            llm = self._llm().with_structured_output(kind, method=method)
            assert isinstance(llm.invoke(WHERE), kind), method

    def completions(self) -> None:
        from langchain_openai import OpenAI

        llm = OpenAI(**self.v1, model=self.model, max_tokens=8)
        assert len(llm.batch(["1, 2, 3,", "a, b, c,"])) == 2

    def responses(self) -> None:
        assert self._llm(use_responses_api=True).invoke("Say hello.").text


class PydanticAI(Checks):
    package = "pydantic-ai-slim[openai]"

    def _agent(self, api: str = "OpenAIChatModel", **fields: Any) -> Any:
        import pydantic_ai
        from pydantic_ai.models import openai
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=f"{self.url}/v1", api_key="none")
        model = getattr(openai, api)(self.model, provider=provider)
        settings = {"temperature": 0.0, "max_tokens": 64}
        return pydantic_ai.Agent(model, model_settings=settings, **fields)

    def chat_and_stream(self) -> None:
        async def stream() -> str:
            async with self._agent().run_stream("Say hello.") as result:
                return [text async for text in result.stream_text()][-1]

        assert self._agent().run_sync("Say hello.").output == asyncio.run(stream())

    def output(self) -> None:
        from pydantic_ai import NativeOutput, ToolOutput

        kind = place()
        for how in (kind, NativeOutput(kind), ToolOutput(kind)):
            assert isinstance(self._agent(output_type=how).run_sync(WHERE).output, kind)

    def tools(self) -> None:
        """A tool that is there in the first turn alone; the answer is one, too, and binding."""
        agent = self._agent(output_type=bool)

        async def once(context: Any, definition: Any) -> Any:
            return definition if context.run_step == 1 else None

        @agent.tool_plain(prepare=once)
        def weather(city: str) -> str:
            """The weather of a city."""
            return "18 degrees"

        assert agent.run_sync(ASK).output in (True, False)

    def responses(self) -> None:
        assert self._agent("OpenAIResponsesModel").run_sync("Say hello.").output


class LLM(Checks):
    package = "llm"

    def _llm(self, *arguments: str) -> str:
        """What `llm` prints, with our model configured as its documentation says."""
        with tempfile.TemporaryDirectory() as folder:
            lines = f"- model_id: ours\n  model_name: {self.model}\n  api_base: {self.url}/v1\n"
            lines += "  supports_schema: true\n  supports_tools: true\n"
            Path(folder, "extra-openai-models.yaml").write_text(lines, "utf-8")
            options = ["-m", "ours", "--key", "none", "-o", "max_tokens", "64"]
            place = {**os.environ, "LLM_USER_PATH": folder}
            return self._run("llm", *options, *arguments, env=place).strip()

    def prompt(self) -> None:
        assert self._llm("Say hello.") and self._llm("--no-stream", "Hi")

    def schema(self) -> None:
        assert [*json.loads(self._llm("--schema", json.dumps(CITY), WHERE))] == ["city"]

    def options(self) -> None:
        told = {"temperature": 0.5, "seed": 1, "frequency_penalty": 0.5, "presence_penalty": 0.5}
        told |= {"top_p": 0.9, "stop": "zzz", "logit_bias": '{"42": -100}'}
        flat = [word for name, value in told.items() for word in ("-o", name, str(value))]
        assert self._llm(*flat, "Say hello.")

    def tools(self) -> None:
        self._llm("-T", "llm_version", "--td", "Which version of llm is this?")


class LMEval(Checks):
    package = "lm_eval[api]"
    _documents = (
        {"q": "The capital of France is", "a": " Paris", "b": " a banana"},
        {"q": "One, two, three, four,", "a": " five", "b": " blue"},
        {"q": "The opposite of hot is", "a": " cold", "b": " Tuesday"},
    )

    def _results(self, kind: str, task: dict[str, Any], *arguments: str) -> dict[str, Any]:
        """The results of a task on our documents, with no more told than needs to be."""
        with tempfile.TemporaryDirectory() as folder:
            lines = "\n".join(map(json.dumps, self._documents))
            Path(folder, "data.jsonl").write_text(lines, "utf-8")
            data = {"data_files": {"test": f"{folder}/data.jsonl"}}
            task |= {"task": "ours", "output_type": kind, "test_split": "test"}
            task |= {"dataset_path": "json", "dataset_kwargs": data}
            Path(folder, "ours.yaml").write_text(json.dumps(task), "utf-8")  # JSON is YAML
            told = ["run", "--tasks", "ours", "--include_path", folder, *arguments]
            told += ["--model", "local-completions", "--output_path", f"{folder}/out"]
            place = f"model={self.model},base_url={self.url}/v1/completions"
            self._run("lm_eval", *told, "--model_args", place)
            file = next(Path(folder, "out").rglob("results*.json"))
            return json.loads(file.read_text("utf-8"))["results"]["ours"]

    def multiple_choice(self) -> None:
        task = {"doc_to_text": "{{q}}", "doc_to_choice": ["{{a}}", "{{b}}"], "doc_to_target": 0}
        alone = self._results("multiple_choice", task)
        assert "acc,none" in alone
        assert alone == self._results("multiple_choice", task, "--batch_size", "2")

    def rolling_likelihood(self) -> None:
        task = {"doc_to_text": "", "doc_to_target": "{{q}}"}
        task |= {"metric_list": [{"metric": "word_perplexity"}]}
        assert self._results("loglikelihood_rolling", task)["word_perplexity,none"] > 1

    def generation(self) -> None:
        task = {"doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
        task |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}}
        task |= {"metric_list": [{"metric": "exact_match"}]}
        assert "exact_match,none" in self._results("generate_until", task)


class GuideLLM(Checks):
    package = "guidellm"

    def sweep(self) -> None:
        """One stream, then 512, then a rate: nothing is refused, and each has the asked tokens."""
        with tempfile.TemporaryDirectory() as folder:
            told = {
                "backend": f"kind=openai_http,target={self.url}",
                "profile": "kind=sweep,sweep_size=3",
                "constraint": "kind=max_duration,seconds=15",
                "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
                "tokenizer": f"kind=huggingface_auto,model={os.environ['TOKENIZER']}",
                "output": f"kind=json,path={folder}/out.json",
            }
            flat = [word for name, value in told.items() for word in (f"--{name}", value)]
            self._run("guidellm", "run", "--disable-console", *flat)
            report = json.loads(Path(folder, "out.json").read_text("utf-8"))
        assert len(report["benchmarks"]) == 3
        for found in report["benchmarks"]:
            done = found["requests"]
            assert not done["errored"], f"{len(done['errored'])}: {done['errored'][0]}"
            assert {one["output_metrics"]["text_tokens"] for one in done["successful"]} <= {16}


class AIPerf(Checks):
    package = "aiperf"

    def profile(self) -> None:
        """Each of 12 requests has the 24 tokens that were asked for."""
        with tempfile.TemporaryDirectory() as folder:
            told = ["--model", self.model, "--url", self.url, "--output-artifact-dir", folder]
            told += ["--tokenizer", os.environ["TOKENIZER"], "--endpoint-type", "chat"]
            told += ["--streaming", "--ui", "none", "--extra-inputs", "ignore_eos:true"]
            told += ["--isl", "32", "--osl", "24", "--request-count", "12", "--concurrency", "2"]
            self._run("aiperf", "profile", *told)
            found = json.loads(Path(folder, "profile_export_aiperf.json").read_text("utf-8"))
        assert found["request_count"]["avg"] == 12 and found["usage_completion_tokens"]["min"] == 24


ALL = (OpenAI, Anthropic, LangChain, PydanticAI, LLM, LMEval, GuideLLM, AIPerf)
CLIENTS = {kind.package.partition("[")[0]: kind for kind in ALL}


def outcomes(client: str, url: str, model: str) -> dict[str, str]:
    """Why each check of a client that is installed here failed, by name; nothing if it passed."""
    checks, found = CLIENTS[client](url, model), {}
    for name in checks.names():
        try:
            getattr(checks, name)()
            found[name] = ""
        except Exception as error:
            said = str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line
            found[name] = " ".join(f"{type(error).__name__}: {said}".split())[:300]
    return found


def environment_of(client: str, folder: Path, is_fresh: bool) -> tuple[str, str]:
    """The Python of a client's environment, which is made if need be, and the client's version."""
    python = str((place := folder / client) / "bin" / "python")
    if is_fresh or not (place / "made").exists():
        run([sys.executable, "-m", "venv", "--clear", str(place)])
        limits = str(Path(__file__).resolve().parent.parent / "requirements.txt")  # of torch
        run([python, "-m", "pip", "install", "-q", "-c", limits, CLIENTS[client].package])
        (place / "made").touch()
    code = f"import importlib.metadata as m; print(m.version({client!r}))"
    return python, run([python, "-c", code]).strip()


def tried(client: str, url: str, model: str, folder: Path, is_fresh: bool) -> dict[str, Any]:
    """Run all checks of one client, in its environment."""
    version, total = "-", len(CLIENTS[client].names())
    try:
        python, version = environment_of(client, folder, is_fresh)
        told = {**os.environ, "TOKENIZER": str(folder / "tokenizer")}
        said = run([python, __file__, "--inside", client, url, model], env=told, cwd=folder)
        fails = {name: why for name, why in json.loads(said.splitlines()[-1]).items() if why}
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        fails = {"environment": str(error)[-300:]}
    passed = 0 if "environment" in fails else total - len(fails)
    return dict(client=client, version=version, passed=passed, total=total, fails=fails)


def main(arguments: list[str]) -> int:
    """Try the clients; 0 if all checks pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "clients")
    parser.add_argument("--model", default="smollm2", help="a name of a .gguf file")
    parser.add_argument("--only", nargs="+", choices=[*CLIENTS], default=[*CLIENTS])
    parser.add_argument("--fresh", action="store_true", help="install the newest versions anew")
    flags = parser.parse_args(arguments)
    from benchmarks.servers import HOST, OURS, started
    from models.catalogue import place_of
    from models.loading import open_model, tokenizer_of

    flags.folder.mkdir(parents=True, exist_ok=True)
    with open_model(place_of(flags.model)) as file:
        tokenizer_of(file).save_pretrained(flags.folder / "tokenizer")  # load tools count with it
    rows, began = [], time.monotonic()
    print("| client | version | checks | what fails |\n|---|---|---|---|", flush=True)
    with started([*OURS, "--model", flags.model]) as server:
        for client in flags.only:
            url = f"http://{HOST}:{server.port}"
            row = tried(client, url, flags.model, flags.folder, flags.fresh)
            cells = client, row["version"], f"{row['passed']}/{row['total']}"
            print(f"| {' | '.join(cells)} | {', '.join(row['fails']) or 'nothing'} |", flush=True)
            for name, why in row["fails"].items():
                print(f"    {name}: {why}", file=sys.stderr, flush=True)
            rows.append(row)
    print(json.dumps({"clients": rows, "seconds": round(time.monotonic() - began)}))
    return int(any(row["fails"] for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(outcomes(*sys.argv[2:])))
    else:
        raise SystemExit(main(sys.argv[1:]))
