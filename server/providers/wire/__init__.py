"""The wire: HTTP towards providers, with every byte of every answer kept.

Both SDKs ride on httpx2 and get a transport of ours, which stands on aiohttp. They make the request: credentials, URL,
headers, body. The answer of a streamed call is not given to them, since parsing every chunk into their models costs
more than all the rest of a turn; it goes to whoever opened the `ResponseCapture`, as bytes.
"""
