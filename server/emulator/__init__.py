"""Strict local emulators of the providers' HTTP APIs.

`strata emulate gemini` and `strata emulate anthropic` run them for people; tests run them in their own process. They
are written from the providers' documentation and import nothing of Strata but the HTTP server, so that they can detect
errors of the clients: every documented rule is enforced with the documented error text. The room promises that the same
requests with the same seed get the same responses.

Other rooms use these modules:

- `gemini.app`, `anthropic.app`: the ASGI application of each emulator
- `server`: serving an emulator, for a person or while a block runs
- `state`: the state of one emulator, with its request log
- `script`, `reply`: scripted replies and faults
- `latency`: how fast the emulated model responds
- `exchange`: one HTTP request and its response

`asgi` is the application around the handler of a provider. `improvise` builds replies without a script, `faults` parses
and arms faults, `signing` makes signatures, and `tokens` counts tokens.
"""
