"""The HTTP API: OpenAI's API for images, and jobs with streams of events, in front of a gateway's gRPC API.

`server` runs `service`, the application, whose routes are in `openai_routes`, `suite_routes` and
`page_routes`. All but the last call the gateway through `gateway`, with the API key of their own caller. Nothing here
decides who may draw what, queues requests, decodes images or imports torch.
"""
