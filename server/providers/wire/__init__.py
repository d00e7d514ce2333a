"""HTTP to providers, with every byte of every response recorded.

Both SDKs use httpx2 and get a transport from here, which sends with aiohttp. The SDKs make the requests: credentials,
URL, headers, body. For streamed calls they do so once per shape of a request, and what they made is kept as a template.
The response of a streamed call does not go to the SDK, because parsing every chunk into its models costs more than the
rest of a turn: a vendor's fold turns its bytes into events.

- `transport`: sends requests, with their time limits and the rule for sending one again
- `exchange`: a request, its recorded response, and the errors of the network
- `request_template`: requests as an SDK builds them, kept as templates
- `call`: one call as both vendors make it
- `frames`: server-sent events
- `answer_values`, `error_response`: reading what both vendors send in a similar form
- `replay`: a transport that feeds stored responses
"""
