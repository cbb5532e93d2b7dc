"""Requests of coding agents as they send them, trimmed to the fields and the kinds of schemas that matter.

Recorded from Claude Code 2.1.197 and Codex CLI 0.171.0 with their default settings, from the second request of
a task on: one tool has been called.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CLAUDE_CODE", "CODEX"]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
CLOSED = {"additionalProperties": False}


def _zod(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"$schema": DRAFT, "type": "object", "properties": properties, "required": required, **CLOSED}


CLAUDE_CODE: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32_000,
    "stream": True,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": '{"session_id":"1"}'},
    "system": [
        {"type": "text", "text": "You are an agent."},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Read a file.",
            "input_schema": _zod(
                ["path"], path={"type": "string"}, limit={"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}
            ),
        },
        {
            "name": "TaskCreate",
            "description": "Make a task.",
            "input_schema": _zod(
                ["subject"],
                subject={"type": "string"},
                metadata={"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
            ),
        },
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today</system-reminder>"},
                {"type": "text", "text": "Read a."},
            ],
        },
        {"role": "system", "content": "Kinds of agents: none."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "107e99158", "name": "Read", "input": {"path": "a"}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "107e99158",
                    "content": "1\tzebra",
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ],
}  # fmt: skip

CODEX: dict[str, Any] = {
    "model": "demo",
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "1",
    "client_metadata": {"session_id": "1"},
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Run a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "tty": {"type": "boolean"}},
                "required": ["cmd"],
                **CLOSED,
            },
        },
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Other agents.",
            "tools": [
                {
                    "type": "function",
                    "name": "close_agent",
                    "description": "End one.",
                    "strict": False,
                    "parameters": {"type": "object", "properties": {"target": {"type": "string"}}, **CLOSED},
                }
            ],
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Read a."}]},
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_eb2ca7e2a",
            "name": "exec_command",
            "arguments": '{"cmd": "cat a"}',
            "call_id": "eb2ca7e2a",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "eb2ca7e2a", "output": "Output:\nzebra"},
    ],
}  # fmt: skip
