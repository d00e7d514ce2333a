"""Payloads: from stored turns to the request of a call, and back from a stored call to the same request.

The room owns the rules of a history and their repair, the signatures that may be sent, the four layers, the arguments
and templates of prompts, and the assistant's settings. It promises that the same values give the same bytes:
`rebuild_payload` builds the request of any past call again from what was stored. A repair or an omission never changes
a stored turn, and is recorded with the call.

Other rooms use these modules:

- `preparation`: `PayloadPreparation`, which loads a conversation and prepares its next payload
- `builder`: `build_payload`, `rebuild_payload`, and the hashes of a prefix
- `call_records`: what is stored of a call at its start and end
- `cache_plan`: the cache plan of a payload
- `messages`: turns as messages in the format of a vendor
- `signatures`: which signatures are withheld, and why
- `arguments`, `renderer`, `transcript`: prompt arguments, the renderer port, and turns as text
- `settings`: an assistant's settings
- `dynamic_clock`: the times in the dynamic layer of the layered order
- `shared_caches`: what a process keeps of its recent conversations: static texts, images, rendered turns
"""
