"""The two pages: a chat, and the API's description. Neither loads anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from fastapi.responses import HTMLResponse


@dataclass(frozen=True)
class Page:
    """A page that stays the same.

    Attributes:
        html: All of it, with its style and script inside.
        policy: Its Content-Security-Policy: what stands in the page may run, and nothing else.
    """

    html: str
    policy: str

    def response(self) -> HTMLResponse:
        """The page as a response."""
        return HTMLResponse(self.html, headers={"Content-Security-Policy": self.policy})


def _page(html: str) -> Page:
    """A page that may run the scripts and styles that it has now, known by their hashes."""
    sources = {
        tag: " ".join(map(_hash_source, re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)))
        for tag in ("script", "style")
    }
    directives = {
        "default-src": "'none'",
        "script-src": sources["script"] or "'none'",
        "style-src": sources["style"] or "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(html, "; ".join(f"{name} {value}" for name, value in directives.items()))


def _hash_source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def chat_page() -> Page:
    """The chat page, from the package's file."""
    return _page((files("pyspec.server") / "chat.html").read_text(encoding="utf-8"))


def description_page(schema: Mapping[str, Any]) -> Page:
    """The endpoints and the fields of their requests, from the OpenAPI schema."""
    template = (files("pyspec.server") / "description.html").read_text(encoding="utf-8")
    endpoints = "\n".join(
        _endpoint(method, path, operation, schema)
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    )
    return _page(template.replace("{{ endpoints }}", endpoints))


def _endpoint(
    method: str, path: str, operation: Mapping[str, Any], schema: Mapping[str, Any]
) -> str:
    parts = [
        f"<h2><span>{escape(method.upper())}</span> <code>{escape(path)}</code></h2>",
        f"<p>{escape(operation.get('description', ''))}</p>",
    ]
    body = operation.get("requestBody")
    if body is not None:
        reference = body["content"]["application/json"]["schema"]
        parts.append(_table(_resolve(reference, schema), schema))
    return "\n".join(parts)


def _table(model: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    required = model.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code></td>"
        f"<td>{escape(_type(field, schema))}</td>"
        f"<td>{'<b>Required.</b> ' * (name in required)}{escape(field.get('description', ''))}</td></tr>"
        for name, field in model["properties"].items()
    ]
    return "<table><tr><th>Field<th>Type<th>Meaning</tr>\n" + "\n".join(rows) + "\n</table>"


def _resolve(reference: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = reference
    for part in reference.get("$ref", "#").split("/")[1:]:
        found = (schema if found is reference else found)[part]
    return found


def _type(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A field's type in a few words."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        inside = ", ".join(_resolve(field, schema).get("properties", ()))
        return f"{name} ({inside})" if inside else str(name)
    alternatives = field.get("anyOf") or field.get("oneOf")
    if alternatives:
        types = [_type(alternative, schema) for alternative in alternatives]
        return " or ".join(dict.fromkeys(type_ for type_ in types if type_ != "null"))
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    if "const" in field:
        return str(field["const"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), schema)}"
    limits = [
        f"{sign} {field[name]}"
        for name, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if name in field
    ]
    return " ".join([str(field.get("type", "any")), *limits])
