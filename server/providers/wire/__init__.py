"""HTTP to providers, with every byte of every response recorded.

Both SDKs use httpx2 and get a transport from here (`transport`), which sends with aiohttp. The SDKs make the request:
credentials, URL, headers, body. The response of a streamed call does not go to the SDK, because parsing every chunk
into its models costs more than the rest of a turn. It goes as bytes to the open `ResponseCapture`, and a vendor's fold
turns the bytes into events. `call` is one call as both vendors make it, `replay` a transport that feeds stored
responses.
"""
