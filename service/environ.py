"""Keys of ours in a WSGI environ."""

ID_KEY = "headrace.request_id"  # str, set before the application's code runs
CLOSE_KEY = "headrace.close"  # True asks the server to close the connection after this answer
