"""The confined process that compiles, checks and renders templates from the network, and evaluates assertions:
`python -m server.prompts.worker SECONDS CHARACTERS BYTES`.

It reads one JSON document per line and writes one in response:

    <- {"ready": true}
    -> {"task": "render", "source": …, "arguments": {…}}      <- {"text": …} or {"failure": {"kind", "message", "line"}}
    -> {"task": "check", "source": …}                         <- {} or {"failure": …}
    -> {"task": "inspect", "source": …}                       <- {"failures": […], "names": [[path, line, guarded], …]}
    -> {"task": "check_layer", "name": …, "source": …}        <- {} or {"failure": …}
    -> {"task": "render_layer", "layer": "static", "dynamic" or "history", "name": …, "source": …, "values": {…}}
                                                              <- {"text": …, "warning": …} or {"failure": …}
    -> {"task": "read_assertions", "assertions": […]}         <- {} or {"fault": [position, message]}
    -> {"task": "check_assertions", "assertions": […], "values": {…}}
                                                              <- {"results": [[passed, message, error code], …]}

`name` is the file name of the template that the source replaces. A warning is a failure with a text.

The process ends when its input ends. Before it reads anything it sets its own limits: memory, open files, no new
process, no written file; and for each task a timer, after which the kernel ends the process. So the limits hold also if
the parent process is dead.
"""

import json
import os
import signal
import sys
from typing import Any, Final

from server.conversation.errors import SettingsInvalid
from server.payload.renderer import TemplateFailure
from server.payload.transcript import transcript_turn_from_json
from server.prompts.analysis import find_fault, find_faults, find_referenced_names
from server.prompts.environment import RENDER_ERRORS, Sandbox, TextTooLong, describe, line_of, render_within
from server.prompts.templates import LayerFailed, read_layer, render_dynamic_layer, render_layer, render_static_layer
from server.replay.rerun.assertion_evaluation import check_assertions
from server.replay.rerun.assertion_evaluation import find_fault as find_assertion_fault
from server.replay.rerun.replay import Assertion

if sys.platform != "win32":
    import resource

_NICENESS: Final = 5
"""Lower priority than that of the server."""
_OPEN_FILES: Final = 32
_MAX_FAULTS: Final = 50
_MAX_NAMES: Final = 500
_NO_MEMORY: Final = b'{"failure":{"kind":"too_large","message":"The template needs too much memory.","line":null}}\n'


def main(arguments: list[str]) -> None:
    """Run tasks until the input ends. Arguments: the limits of a task in seconds, characters and bytes."""
    seconds, max_chars, memory_bytes = float(arguments[0]), int(arguments[1]), int(arguments[2])
    sandbox = Sandbox()
    _confine(memory_bytes)
    _send(b'{"ready":true}\n')
    while line := sys.stdin.buffer.readline():
        _set_timer(seconds)
        answer = _respond(sandbox, max_chars, line)
        _set_timer(0)
        _send(answer)


def _respond(sandbox: Sandbox, max_chars: int, line: bytes) -> bytes:
    try:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        answer = _run_task(sandbox, max_chars, request)
        return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    except MemoryError:
        return _NO_MEMORY


def _run_task(sandbox: Sandbox, max_chars: int, request: dict[str, Any]) -> dict[str, Any]:
    match request["task"]:
        case "check":
            return _check(sandbox, request)
        case "inspect":
            return _inspect(sandbox, request)
        case "check_layer":
            return _check_layer(request)
        case "render_layer":
            return _render_layer(max_chars, request)
        case "read_assertions":
            fault = find_assertion_fault(_assertions(request))
            return {} if fault is None else {"fault": fault}
        case "check_assertions":
            results = check_assertions(_assertions(request), request["values"])
            return {"results": [(result.passed, result.message, result.error_code) for result in results]}
        case _:
            return _render(sandbox, max_chars, request)


def _check(sandbox: Sandbox, request: dict[str, Any]) -> dict[str, Any]:
    try:
        tree = sandbox.parse(request["source"])
        fault = find_fault(tree)
        sandbox.compile(tree)
    except RENDER_ERRORS as error:
        return _failure("parse", error)
    return {} if fault is None else _failure_at("parse", fault.message, fault.line)


def _inspect(sandbox: Sandbox, request: dict[str, Any]) -> dict[str, Any]:
    """Check as `_check` does, and return all faults and the names that the template refers to."""
    faults: list[dict[str, Any]] = []
    names: list[tuple[str, int, bool]] = []
    try:
        tree = sandbox.parse(request["source"])
        faults += [_failure_at("parse", fault.message, fault.line)["failure"] for fault in find_faults(tree)]
        names += [(name.path, name.line, name.is_guarded) for name in find_referenced_names(tree, sandbox.globals)]
        sandbox.compile(tree)
    except RENDER_ERRORS as error:
        faults.append(_failure("parse", error)["failure"])
    return {"failures": faults[:_MAX_FAULTS], "names": names[:_MAX_NAMES]}


def _render(sandbox: Sandbox, max_chars: int, request: dict[str, Any]) -> dict[str, Any]:
    try:
        template = sandbox.from_string(request["source"])
    except RENDER_ERRORS as error:
        return _failure("parse", error)
    try:
        return {"text": render_within(template, request["arguments"], max_chars)}
    except (TextTooLong, OverflowError) as error:  # a range, a repetition or a number is too large
        return _failure("too_large", error)
    except RENDER_ERRORS as error:
        return _failure("render", error)


def _check_layer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        read_layer(request["name"], request["source"])
    except SettingsInvalid as error:
        return _failure_at("parse", error.message, None)
    return {}


def _render_layer(max_chars: int, request: dict[str, Any]) -> dict[str, Any]:
    try:
        template = read_layer(request["name"], request["source"])
    except SettingsInvalid as error:
        return _failure_at("parse", error.message, None)
    values = request["values"]
    try:
        match request["layer"]:
            case "static":
                return {"text": render_static_layer(template, values, max_chars)}
            case "dynamic":
                text, failure = render_dynamic_layer(template, values, max_chars)
                return {"text": text} if failure is None else {"text": text, "warning": _failure_fields(failure)}
            case _:
                if "turns" in values:
                    values = {**values, "turns": [transcript_turn_from_json(turn) for turn in values["turns"]]}
                return {"text": render_layer(template, values, max_chars)}
    except LayerFailed as error:
        return {"failure": _failure_fields(error.failure)}


def _assertions(request: dict[str, Any]) -> list[Assertion]:
    return [Assertion(**assertion) for assertion in request["assertions"]]


def _failure_fields(failure: TemplateFailure) -> dict[str, Any]:
    return {"kind": failure.kind, "message": failure.message, "line": failure.line}


def _failure(kind: str, error: Exception) -> dict[str, Any]:
    return _failure_at(kind, describe(error), line_of(error))


def _failure_at(kind: str, message: str, line: int | None) -> dict[str, Any]:
    return {"failure": {"kind": kind, "message": message, "line": line}}


def _confine(memory_bytes: int) -> None:
    if sys.platform == "win32":
        return
    os.nice(_NICENESS)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _lower(resource.RLIMIT_NOFILE, _OPEN_FILES)
    _lower(resource.RLIMIT_NPROC, 0)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # other kernels reject or ignore this limit
        _lower(resource.RLIMIT_AS, memory_bytes)


def _lower(kind: int, maximum: int) -> None:
    _, hard = resource.getrlimit(kind)
    lowered = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
    resource.setrlimit(kind, (lowered, lowered))


def _set_timer(seconds: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _send(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
