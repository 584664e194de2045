"""Which tools agent programs declare to a model: names, arguments, types. `agent_tools.json` was made with it; no text of theirs is kept.

    python tests/golden/agent_tools.py claude-code 2.1.197 -- claude -p hello
    python tests/golden/agent_tools.py codex 0.171.0 -- codex exec --skip-git-repo-check -c model_provider=x -c model=gpt-5.5 \\
        -c 'model_providers.x={name="x",base_url="{url}/v1",wire_api="responses",env_key="ANTHROPIC_API_KEY"}' hello
    python tests/golden/agent_tools.py kimi-code 2.1.0 -- kimi -p hello
    python tests/golden/agent_tools.py --port 18777 openclaw 2026.9.6 -- openclaw agent --local --agent main --message hello
    python tests/golden/agent_tools.py --source folder/of/hermes_agent hermes 0.19.0
    python tests/golden/agent_tools.py --source folder/of/mini_swe_agent bash 2.4.6

A program is run against a server on this machine that reads its first request with tools and refuses it. Programs read where that server
is from the environment, OpenClaw from its configuration (a provider at port 18777). With `--source`, literals in Python files are read.
"""

import argparse
import ast
import http.server
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).parent / "agent_tools.json"


def arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """The facts of a JSON Schema: what each argument is, without a word about it."""
    required = schema.get("required", [])
    return {name: {key: said[key] for key in ("type", "enum") if said and said.get(key)} | ({"required": True} if name in required else {})
            for name, said in schema.get("properties", {}).items()}


def tools(declared: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of a request's tools, in any of the three dialects; None are the arguments of one that takes free text."""
    found = {}
    for entry in declared:
        tool = entry.get("function", entry)
        schema = tool.get("parameters") or tool.get("input_schema")
        if tool.get("name") and (schema or tool.get("type") == "custom"):
            found[tool["name"]] = arguments(schema) if schema else None
    return found


def sent(command: list[str], port: int) -> dict[str, Any]:
    """What a program declares in its first request that has tools."""
    requests: list[dict[str, Any]] = []

    class Refuser(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)))
            requests.extend([body] if body.get("tools") else [])
            self.answer(400, {"type": "error", "error": {"type": "invalid_request_error", "message": "seen"}})

        def do_GET(self) -> None:
            self.answer(200, {"object": "list", "data": []})

        def answer(self, status: int, body: dict[str, Any]) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Refuser)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    env = {**os.environ, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "x", "KIMI_MODEL_NAME": "m", "KIMI_MODEL_API_KEY": "x",
           "KIMI_MODEL_BASE_URL": f"{url}/v1", "KIMI_MODEL_PROVIDER_TYPE": "openai", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    subprocess.run([word.replace("{url}", url) for word in command], env=env, stdin=subprocess.DEVNULL, timeout=180, check=False)
    server.shutdown()
    return tools(max(requests, key=lambda body: len(body["tools"]))["tools"])


def read(folder: Path) -> dict[str, Any]:
    """The tools that Python files hold as literals: `{"name": …, "parameters": …}`, whatever stands for their descriptions."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict) and {"name", "parameters"} <= {key.value for key in node.keys if isinstance(key, ast.Constant)}:
                plain = value(node)
                if isinstance(plain["name"], str) and isinstance(plain["parameters"], dict) and plain["parameters"].get("properties"):
                    found[plain["name"]] = arguments(plain["parameters"])
    return found


def value(node: ast.expr) -> Any:
    """A literal as it is; what is none is None."""
    if isinstance(node, ast.Dict):
        return {key.value: value(item) for key, item in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)}
    if isinstance(node, ast.List):
        return [value(item) for item in node.elts]
    return node.value if isinstance(node, ast.Constant) else None


def main() -> None:
    """Add one program to the oracle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("version")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--source", type=Path)
    parser.add_argument("command", nargs="*")
    parsed = parser.parse_args()
    known = json.loads(ORACLE.read_text()) if ORACLE.exists() else {}
    found = read(parsed.source) if parsed.source else sent(parsed.command, parsed.port)
    how = "read in its source" if parsed.source else "sent by the program"
    known[parsed.name] = {"version": parsed.version, "how": how, "tools": found}
    ORACLE.write_text(json.dumps(dict(sorted(known.items())), separators=(",", ":"), sort_keys=True).replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    main()
