"""Keys of ours in a WSGI environ, and what else the web tier and its servers agree on."""

ID_KEY = "headrace.request_id"  # str, set before the application's code runs
BODY_KEY = "headrace.body"  # bytes, or the exception that refused it: the body can be read once only
CLOSE_KEY = "headrace.close"  # True asks the server to close the connection after this answer
WHOLE_KEY = "headrace.whole"  # (wsgi.input, CONTENT_LENGTH, body) from a server that has all of the body already
WATCH_KEY = "headrace.watch"  # of a server that sees its clients leave: `Doorbell.watch`
VIEWS_KEY = "headrace.views"  # the `start_response` of a server that sends memoryviews, from where they lie

PING = b": ping\n\n"  # a comment of server-sent events: shows that a stream lives, and no client makes an event of it
