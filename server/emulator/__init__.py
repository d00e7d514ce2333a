"""Strict local emulators of the providers' HTTP APIs.

`strata emulate gemini` and `strata emulate anthropic` run them for people; tests run them in their own process. They
are written from the providers' documentation and import nothing of Strata's clients, so that they can prove the clients
wrong: every documented rule is enforced with the documented error text. The same requests with the same seed get the
same responses.

Shared by both providers: replies (`reply`, `script`, `improvise`), speed (`latency`), faults (`faults`), signatures
(`signing`), token counts (`tokens`), one HTTP exchange (`exchange`), the ASGI application around a provider's handler
(`asgi`), the request log (`request_log`), shared state (`state`) and the server (`server`).
"""
