"""The HTTP service: OpenAI's API over one engine, and a chat page.

app         the endpoints
schemas     what they take and give
prepare     from a request to generations to run
scheduler   one thread that owns the engine and runs the generations of all clients
answers     from pieces to what the API returns
tools       tool calls in a model's text
guard       who may ask, and how much
errors      what is said when something is refused or fails
monitoring  figures for Prometheus
pages       the chat page and the API's description
run         sockets, signals, and the end
"""
