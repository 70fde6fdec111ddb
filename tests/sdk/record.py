"""Records what the Python SDKs of LLM APIs send, for tests/sdk.rs.

Run again, from the repository's root, when an SDK has a new major version:

    python3 tests/sdk/record.py

It makes a virtual environment under target/, installs the newest SDKs into it, starts a server
on a local port, makes every call of CASES, and writes each request to
`tests/sdk/<client>/<case>.<turn>.http`: request line, headers without those that differ from run
to run, an empty line, the body's bytes as they came. `versions.txt` says what was installed.

The server refuses every request, for only the request matters here: what an assistant said in an
earlier turn stands in the call. What each call means stands beside it, written by hand:
`<case>.expect`. A recording that means something else fails tests/sdk.rs, and so does one without
an expectation.
"""

import base64
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import venv

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
VENV = ROOT / "target" / "sdk-venv"
PACKAGES = [
    "anthropic",
    "boto3",
    "cohere",
    "google-genai",
    "langchain-openai",
    "llama-index-llms-openai-like",
    "ollama",
    "openai",
]
HEADERS_KEPT = {
    "accept",
    "anthropic-version",
    "content-encoding",
    "content-type",
    "x-amzn-sagemaker-inference-component",
    "x-amzn-sagemaker-session-id",
}

# A red and a blue pixel.
RED = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/q842iQAAAABJRU5ErkJggg=="
)
BLUE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYPj/HwADAgH/p0XtswAAAABJRU5ErkJggg=="
)

SYSTEM = "You are a travel guide. Answer in one line — \"briefly\", s'il vous plaît. 旅"
ASK = "Which city has the most canals?\nTell me one."
SAID = "Hamburg, by far: over 2,000 bridges."
MORE = "And is it warm there now? 🌤"
SAID_MORE = "It is 21 °C."
THANKS = "Thanks!"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city"}},
    "required": ["city"],
}
ABOUT = "The weather of a city"
RESULT = "21 degrees"


def openai_tool() -> dict:
    return {
        "type": "function",
        "function": {"name": "get_weather", "description": ABOUT, "parameters": WEATHER},
    }


def openai_call() -> dict:
    return {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Hamburg"}'},
    }


def turns(messages: list, cuts: list) -> list:
    """A conversation as its turns send it: `messages` up to each of `cuts`."""
    return [messages[:cut] for cut in cuts]


def openai_cases(url: str) -> dict:
    import openai

    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    chat = client.chat.completions
    plain = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": MORE},
        {"role": "assistant", "content": SAID_MORE},
        {"role": "user", "content": THANKS},
    ]
    tools = [
        {"role": "developer", "content": SYSTEM},
        {"role": "user", "content": MORE},
        {"role": "assistant", "content": None, "tool_calls": [openai_call()]},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        {"role": "assistant", "content": SAID_MORE},
        {"role": "user", "content": THANKS},
    ]
    image = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What colour?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64," + RED}},
            ],
        },
        {"role": "assistant", "content": "Red."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64," + BLUE}},
                {"type": "text", "text": "And this?"},
            ],
        },
    ]
    items = [
        {"role": "user", "content": MORE},
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "get_weather",
            "arguments": '{"city": "Hamburg"}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
        {"role": "assistant", "content": [{"type": "output_text", "text": SAID_MORE}]},
        {"role": "user", "content": [{"type": "input_text", "text": THANKS}]},
    ]
    flat_tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}
    return {
        "chat": [
            lambda sent=sent, stream=stream: chat.create(
                model="m-large", messages=sent, temperature=0.2, stream=stream, user="u-1"
            )
            for sent, stream in zip(turns(plain, [2, 4, 6]), [False, True, True])
        ],
        "chat_tools": [
            lambda sent=sent: chat.create(
                model="m-large", messages=sent, tools=[openai_tool()], tool_choice="auto"
            )
            for sent in turns(tools, [2, 4, 6])
        ],
        "chat_images": [
            lambda sent=sent: chat.create(model="m-large", messages=sent, max_tokens=5)
            for sent in turns(image, [1, 3])
        ],
        "chat_extra": [
            lambda: chat.create(
                model="m-large",
                messages=plain[:2],
                extra_body={"cache_salt": "s-1", "top_k": 3, "guided_json": WEATHER},
                response_format={"type": "json_object"},
            )
        ],
        "completions": [
            lambda: client.completions.create(
                model="m-base", prompt="Once upon a time", max_tokens=9, stream=True
            )
        ],
        "completions_batch": [
            lambda: client.completions.create(model="m-base", prompt=["Once upon", "a time"])
        ],
        "completions_ids": [
            lambda: client.completions.create(model="m-base", prompt=[12, 345, 6789])
        ],
        "completions_ids_batch": [
            lambda: client.completions.create(model="m-base", prompt=[[12, 345], [6789]])
        ],
        "responses": [
            lambda: client.responses.create(model="m-large", instructions=SYSTEM, input=ASK)
        ],
        "responses_items": [
            lambda sent=sent, stream=stream: client.responses.create(
                model="m-large", input=sent, instructions=SYSTEM, tools=[flat_tool], stream=stream
            )
            for sent, stream in zip(turns(items, [1, 3, 5]), [False, True, False])
        ],
        "responses_previous": [
            lambda: client.responses.create(
                model="m-large", input=THANKS, previous_response_id="resp_1"
            )
        ],
        "embeddings": [lambda: client.embeddings.create(model="m-embed", input=["one", "two"])],
    }


def anthropic_cases(url: str) -> dict:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = {"name": "get_weather", "description": ABOUT, "input_schema": WEATHER}
    marked = {"type": "ephemeral"}
    plain = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": MORE},
        {"role": "assistant", "content": SAID_MORE},
        {"role": "user", "content": THANKS},
    ]
    tools = [
        {"role": "user", "content": [{"type": "text", "text": MORE, "cache_control": marked}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": "c2ln"},
                {"type": "text", "text": "Let me see."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "get_weather",
                    "input": {"city": "Hamburg"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": RESULT}],
                }
            ],
        },
        {"role": "assistant", "content": SAID_MORE},
        {"role": "user", "content": THANKS},
    ]
    image = [
        {
            "role": "user",
            "content": [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": RED},
                },
                {"type": "text", "text": "What colour?"},
            ],
        },
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": THANKS},
    ]
    blocks = [
        {"type": "text", "text": SYSTEM},
        {"type": "text", "text": "Be kind.", "cache_control": marked},
    ]
    make = client.messages.create
    return {
        "messages": [
            lambda sent=sent, stream=stream: make(
                model="m-large", max_tokens=99, system=SYSTEM, messages=sent, stream=stream
            )
            for sent, stream in zip(turns(plain, [1, 3, 5]), [False, True, False])
        ],
        "messages_tools": [
            lambda sent=sent: make(
                model="m-large", max_tokens=99, messages=sent, system=blocks, tools=[tool]
            )
            for sent in turns(tools, [1, 3, 5])
        ],
        "messages_images": [
            lambda sent=sent: make(model="m-large", max_tokens=9, messages=sent)
            for sent in turns(image, [1, 3])
        ],
        "count_tokens": [
            lambda: client.messages.count_tokens(
                model="m-large", system=SYSTEM, messages=plain[:1], tools=[tool]
            )
        ],
    }


def ollama_cases(url: str) -> dict:
    import ollama

    client = ollama.Client(host=url)
    plain = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": MORE},
    ]
    call = {"function": {"name": "get_weather", "arguments": {"city": "Hamburg"}}}
    tools = [
        {"role": "user", "content": MORE},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": RESULT, "tool_name": "get_weather"},
        {"role": "assistant", "content": SAID_MORE},
        {"role": "user", "content": THANKS},
    ]
    image = [
        {"role": "user", "content": "What colour?", "images": [base64.b64decode(RED)]},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": THANKS},
    ]
    return {
        "chat": [
            lambda sent=sent, stream=stream: drain(
                client.chat(model="m-small", messages=sent, stream=stream, keep_alive="5m")
            )
            for sent, stream in zip(turns(plain, [2, 4]), [False, True])
        ],
        "chat_tools": [
            lambda sent=sent: client.chat(
                model="m-small", messages=sent, tools=[openai_tool()], options={"seed": 3}
            )
            for sent in turns(tools, [1, 3, 5])
        ],
        "chat_images": [
            lambda sent=sent: client.chat(model="m-small", messages=sent)
            for sent in turns(image, [1, 3])
        ],
        "generate": [
            lambda: client.generate(
                model="m-small", prompt="Once upon a time", system=SYSTEM, options={"seed": 3}
            )
        ],
    }


def cohere_cases(url: str) -> dict:
    import cohere

    client = cohere.ClientV2(api_key="none", base_url=url)
    plain = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": MORE},
    ]
    tools = [
        {"role": "user", "content": MORE},
        {"role": "assistant", "tool_plan": "I should look.", "tool_calls": [openai_call()]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "document", "document": {"data": RESULT}}],
        },
        {"role": "assistant", "content": SAID_MORE},
        {"role": "user", "content": THANKS},
    ]
    return {
        "chat": [
            lambda sent=sent: client.chat(model="m-command", messages=sent, temperature=0.3)
            for sent in turns(plain, [2, 4])
        ],
        "chat_stream": [
            lambda: drain(client.chat_stream(model="m-command", messages=plain[:2]))
        ],
        "chat_tools": [
            lambda sent=sent: client.chat(model="m-command", messages=sent, tools=[openai_tool()])
            for sent in turns(tools, [1, 3, 5])
        ],
    }


def google_cases(url: str) -> dict:
    from google import genai
    from google.genai import types

    client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=url))
    part = types.Part

    def content(role: str, *parts: object) -> object:
        return types.Content(role=role, parts=list(parts))

    plain = [
        content("user", part(text=ASK)),
        content("model", part(text=SAID)),
        content("user", part(text=MORE)),
    ]
    tools = [
        content("user", part(text=MORE)),
        content(
            "model", part.from_function_call(name="get_weather", args={"city": "Hamburg"})
        ),
        content(
            "user",
            part.from_function_response(name="get_weather", response={"result": RESULT}),
        ),
        content("model", part(text=SAID_MORE)),
        content("user", part(text=THANKS)),
    ]
    image = [
        content(
            "user",
            part(text="What colour?"),
            part.from_bytes(data=base64.b64decode(RED), mime_type="image/png"),
        ),
        content("model", part(text="Red.")),
        content("user", part(text=THANKS)),
    ]
    declared = types.Tool(
        function_declarations=[
            types.FunctionDeclaration(
                name="get_weather", description=ABOUT, parameters_json_schema=WEATHER
            )
        ]
    )
    make = client.models.generate_content
    return {
        "generate": [
            lambda sent=sent: make(
                model="m-gem",
                contents=sent,
                config=types.GenerateContentConfig(system_instruction=SYSTEM, temperature=0.1),
            )
            for sent in turns(plain, [1, 3])
        ],
        "generate_text": [lambda: make(model="m-gem", contents="Once upon a time")],
        "generate_stream": [
            lambda: drain(
                client.models.generate_content_stream(model="m-gem", contents=plain[:1])
            )
        ],
        "generate_tools": [
            lambda sent=sent: make(
                model="m-gem",
                contents=sent,
                config=types.GenerateContentConfig(tools=[declared], system_instruction=SYSTEM),
            )
            for sent in turns(tools, [1, 3, 5])
        ],
        "generate_images": [
            lambda sent=sent: make(model="m-gem", contents=sent)
            for sent in turns(image, [1, 3])
        ],
    }


def aws_client(service: str, url: str) -> object:
    import boto3
    import botocore.config

    return boto3.client(
        service,
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=botocore.config.Config(retries={"total_max_attempts": 1}),
    )


def bedrock_cases(url: str) -> dict:
    client = aws_client("bedrock-runtime", url)
    plain = [
        {"role": "user", "content": [{"text": ASK}]},
        {"role": "assistant", "content": [{"text": SAID}]},
        {"role": "user", "content": [{"text": MORE}]},
    ]
    use = {"toolUseId": "use_1", "name": "get_weather", "input": {"city": "Hamburg"}}
    tools = [
        {"role": "user", "content": [{"text": MORE}]},
        {"role": "assistant", "content": [{"text": "Let me see."}, {"toolUse": use}]},
        {
            "role": "user",
            "content": [{"toolResult": {"toolUseId": "use_1", "content": [{"text": RESULT}]}}],
        },
        {"role": "assistant", "content": [{"text": SAID_MORE}]},
        {"role": "user", "content": [{"text": THANKS}]},
    ]
    pixel = {"format": "png", "source": {"bytes": base64.b64decode(RED)}}
    image = [
        {"role": "user", "content": [{"image": pixel}, {"text": "What colour?"}]},
        {"role": "assistant", "content": [{"text": "Red."}]},
        {"role": "user", "content": [{"text": THANKS}]},
    ]
    spec = {"name": "get_weather", "description": ABOUT, "inputSchema": {"json": WEATHER}}
    return {
        "converse": [
            lambda sent=sent: client.converse(
                modelId="m-claude",
                system=[{"text": SYSTEM}],
                messages=sent,
                inferenceConfig={"maxTokens": 9},
            )
            for sent in turns(plain, [1, 3])
        ],
        "converse_stream": [
            lambda: client.converse_stream(modelId="m-claude", messages=plain[:1])
        ],
        "converse_tools": [
            lambda sent=sent: client.converse(
                modelId="m-claude",
                messages=sent,
                system=[{"text": SYSTEM}, {"cachePoint": {"type": "default"}}],
                toolConfig={"tools": [{"toolSpec": spec}]},
            )
            for sent in turns(tools, [1, 3, 5])
        ],
        "converse_images": [
            lambda sent=sent: client.converse(modelId="m-claude", messages=sent)
            for sent in turns(image, [1, 3])
        ],
    }


def sagemaker_cases(url: str) -> dict:
    client = aws_client("sagemaker-runtime", url)
    plain = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": MORE},
    ]

    def invoke(body: dict, **more: str) -> object:
        return client.invoke_endpoint(
            EndpointName="llm", ContentType="application/json", Body=json.dumps(body), **more
        )

    return {
        "inputs": [
            lambda: invoke({"inputs": "Once upon a time", "parameters": {"temperature": 0.1}})
        ],
        "messages": [
            lambda sent=sent: invoke({"messages": sent, "max_tokens": 9}) for sent in turns(plain, [2, 4])
        ],
        "component": [
            lambda: invoke({"prompt": "Once upon a time"}, InferenceComponentName="adapter-7")
        ],
        "stream": [
            lambda: client.invoke_endpoint_with_response_stream(
                EndpointName="llm",
                ContentType="application/json",
                Body=json.dumps({"inputs": "Once upon a time", "stream": True}),
            )
        ],
    }


def langchain_cases(url: str) -> dict:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: str) -> str:
        """The weather of a city"""
        return RESULT

    model = ChatOpenAI(model="m-large", base_url=url + "/v1", api_key="none", max_retries=0)
    plain = [SystemMessage(SYSTEM), HumanMessage(ASK), AIMessage(SAID), HumanMessage(MORE)]
    call = {"name": "get_weather", "args": {"city": "Hamburg"}, "id": "call_1"}
    tools = [
        SystemMessage(SYSTEM),
        HumanMessage(MORE),
        AIMessage("", tool_calls=[call]),
        ToolMessage(RESULT, tool_call_id="call_1"),
        AIMessage(SAID_MORE),
        HumanMessage(THANKS),
    ]
    image = [
        HumanMessage(
            [
                {"type": "text", "text": "What colour?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64," + RED}},
            ]
        ),
        AIMessage("Red."),
        HumanMessage(THANKS),
    ]
    return {
        "chat": [
            lambda sent=sent, call=call: drain(call(sent))
            for sent, call in zip(turns(plain, [2, 4]), [model.invoke, model.stream])
        ],
        "chat_tools": [
            lambda sent=sent: model.bind_tools([get_weather]).invoke(sent)
            for sent in turns(tools, [2, 4, 6])
        ],
        "chat_images": [lambda sent=sent: model.invoke(sent) for sent in turns(image, [1, 3])],
    }


def llamaindex_cases(url: str) -> dict:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def get_weather(city: str) -> str:
        """The weather of a city"""
        return RESULT

    model = OpenAILike(
        model="m-large",
        api_base=url + "/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )
    plain = [
        ChatMessage(role="system", content=SYSTEM),
        ChatMessage(role="user", content=ASK),
        ChatMessage(role="assistant", content=SAID),
        ChatMessage(role="user", content=MORE),
    ]
    image = [
        ChatMessage(
            role="user",
            blocks=[
                TextBlock(text="What colour?"),
                ImageBlock(image=base64.b64decode(RED), image_mimetype="image/png"),
            ],
        ),
        ChatMessage(role="assistant", content="Red."),
        ChatMessage(role="user", content=THANKS),
    ]
    weather = FunctionTool.from_defaults(get_weather)
    return {
        "chat": [
            lambda sent=sent, call=call: drain(call(sent))
            for sent, call in zip(turns(plain, [2, 4]), [model.chat, model.stream_chat])
        ],
        "chat_tools": [
            lambda sent=sent: model.chat_with_tools([weather], chat_history=sent)
            for sent in turns(plain, [2, 4])
        ],
        "chat_images": [lambda sent=sent: model.chat(sent) for sent in turns(image, [1, 3])],
        "complete": [
            lambda: OpenAILike(
                model="m-base", api_base=url + "/v1", api_key="none", max_retries=0
            ).complete("Once upon a time")
        ],
    }


CASES = {
    "anthropic": anthropic_cases,
    "bedrock": bedrock_cases,
    "cohere": cohere_cases,
    "google": google_cases,
    "langchain": langchain_cases,
    "llamaindex": llamaindex_cases,
    "ollama": ollama_cases,
    "openai": openai_cases,
    "sagemaker": sagemaker_cases,
}


def drain(answer: object) -> None:
    """Streams send nothing before somebody reads."""
    if hasattr(answer, "__next__"):
        for _ in answer:
            pass


class Recorder(http.server.BaseHTTPRequestHandler):
    """Keeps every request and refuses it."""

    protocol_version = "HTTP/1.1"
    seen: list = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        head = [f"POST {self.path} HTTP/1.1"]
        head += sorted(
            f"{name.lower()}: {value}"
            for name, value in self.headers.items()
            if name.lower() in HEADERS_KEPT
        )
        Recorder.seen.append("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        answer = b'{"error": {"message": "recorded", "code": 400}, "message": "recorded"}'
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def record(client: str, case: str, calls: list) -> None:
    for turn, call in enumerate(calls, 1):
        Recorder.seen.clear()
        try:
            call()
        except Exception as error:  # Every SDK has its own class for a refusal.
            refusal = error
        else:
            sys.exit(f"{client}/{case}: the call was not refused")
        if len(Recorder.seen) != 1:
            sys.exit(f"{client}/{case}: {len(Recorder.seen)} requests came: {refusal!r}")
        (FOLDER / client / f"{case}.{turn}.http").write_bytes(Recorder.seen[0])


def installed() -> None:
    """Runs this file again with the SDKs."""
    if pathlib.Path(sys.prefix) == VENV:
        return
    python = VENV / "bin" / "python"
    if not python.exists():
        venv.create(VENV, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", *PACKAGES], check=True)
    os.execv(python, [str(python), __file__])


def versions() -> str:
    from importlib.metadata import version

    return "".join(f"{package} {version(package)}\n" for package in PACKAGES)


def main() -> None:
    installed()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    count = 0
    for client, cases in CASES.items():
        (FOLDER / client).mkdir(exist_ok=True)
        for old in (FOLDER / client).glob("*.http"):
            old.unlink()
        for case, calls in cases(url).items():
            record(client, case, calls)
            count += len(calls)
        print(f"{client}: recorded")
    (FOLDER / "versions.txt").write_text(versions())
    server.shutdown()
    print(f"{count} requests")


main()
