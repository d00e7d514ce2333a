"""Strict local stand-ins for the providers: HTTP servers that behave as their documents say.

`strata emulate gemini` and `strata emulate anthropic` run them for people, the tests run them in their own process.
They are written from the providers' documents and know nothing of Strata's clients, so that they can prove those wrong:
each documented rule is enforced with the documented error text. The same requests get the same answers, given the same
seed.

Shared by both: what the model says (`reply`, `script`, `improvise`), how fast (`latency`), what may go wrong
(`faults`), signatures (`signing`), token counts (`tokens`), one HTTP exchange (`exchange`), the application around a
provider's handler (`front`), what was asked (`request_log`), all of it together (`state`), and serving it (`server`).
"""
