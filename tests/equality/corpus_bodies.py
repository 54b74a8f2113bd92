"""Bodies: how their length is told, how it is lied about, chunks and what can be wrong with them."""

from __future__ import annotations

from tests.equality.entry import OURS, PLAIN, Subject, chunked, chunks, get, post, sent

LENGTHS, CODINGS, CHUNKS, READING, JSON = Subject(), Subject(), Subject(), Subject((PLAIN,)), Subject((OURS,))
SUBJECTS = {"lengths": LENGTHS, "codings": CODINGS, "chunks": CHUNKS, "reading": READING, "JSON": JSON}

# Content-Length

for length in ("0", "00", "5", "005", "5 ", "\t5", "+5", "-5", "-0", "0x5", "5.0", "5e0", "5,5", "5, 5", "5;", "5 5"):
    LENGTHS.add(f"Content-Length {length!r}", sent("/echo", f"Content-Length: {length}", body="12345"), half_close=True)
for length in (
    "",
    " ",
    "a",
    "5a",
    "\xb2",
    "\xb9",
    "\xbc",
    "\xa05",
    "5\x0c",
    "5\0",
    "'5'",
    "1_0",
    "\xef\xbc\x95",
    "five",
):
    LENGTHS.add(f"Content-Length {length!r}", sent("/echo", f"Content-Length: {length}", body="12345"), half_close=True)
for length in (2**31, 2**32 + 5, 2**63, 2**64, 2**64 + 5, 10**30):
    LENGTHS.add(f"Content-Length {length}", sent("/echo", f"Content-Length: {length}", body="12345"), half_close=True)
    LENGTHS.add(
        f"Content-Length {length}, unread", sent("/unread", f"Content-Length: {length}", body="1"), half_close=True
    )
for digits in (100, 4300, 4301, 8000):
    zeros = "5".rjust(digits, "0")
    LENGTHS.add(f"Content-Length of {digits} digits", sent("/echo", "Content-Length: " + "9" * digits), half_close=True)
    LENGTHS.add(
        f"Content-Length 5 in {digits} digits", sent("/echo", "Content-Length: " + zeros, body="12345"), half_close=True
    )
_TWO = {
    "equal": ("5", "5"),
    "different": ("5", "6"),
    "zero first": ("0", "5"),
    "one empty": ("5", ""),
    "padded": ("5", "05"),
}
for name, (one, other) in _TWO.items():
    two = [f"Content-Length: {one}", f"content-length: {other}"]
    LENGTHS.add(f"two lengths: {name}", sent("/echo", *two, body="12345"), half_close=True)
LENGTHS.add("Content_Length", sent("/echo", "Content_Length: 5", body="12345"), half_close=True)
LENGTHS.add("Content-Length and Content_Length", sent("/echo", "Content-Length: 5", "Content_Length: 3", body="12345"))
LENGTHS.add("Content-Length with a space before the colon", sent("/echo", "Content-Length : 5", body="12345"))
LENGTHS.add("no length", sent("/echo", body="12345"), half_close=True)
LENGTHS.add("no length and no body", sent("/echo"))
LENGTHS.add("length zero", post())
LENGTHS.add("GET with a body", sent("/environ", "Content-Length: 5", body="12345", method="GET"))
LENGTHS.add("GET with a body that is read", sent("/body", "Content-Length: 5", body="12345", method="GET"))
LENGTHS.add("GET with length zero", sent("/environ", "Content-Length: 0", method="GET"))
LENGTHS.add("a body shorter than said", sent("/echo", "Content-Length: 10", body="12345"), half_close=True)
LENGTHS.add("a body of nothing where some was said", sent("/echo", "Content-Length: 10"), half_close=True)
LENGTHS.add("a body shorter than said, unread", sent("/unread", "Content-Length: 10", body="12345"), half_close=True)
LENGTHS.add("a body shorter than said, for Flask", sent("/flask/echo", "Content-Length: 9", body="1"), half_close=True)
LENGTHS.add("a body longer than said", sent("/echo", "Content-Length: 3", body="12345"), half_close=True)
LENGTHS.add("a body longer than said by a line end", sent("/echo", "Content-Length: 3", body="123\r\n"))
LENGTHS.add("a body longer than said by a request", sent("/echo", "Content-Length: 3", body=b"123" + get()), answers=2)
LENGTHS.add("every byte", post(body=bytes(range(256))))
LENGTHS.add("a body like a head", post(body=get("/nowhere")))
LENGTHS.add("a body like an end of a head", post(body="\r\n\r\n\r\n\r\n"))
LENGTHS.add("a body with an answer in it", post("/echo", body="x HTTP/1.1 200 OK\r\n\r\n"))
for size in (1, 8191, 8192, 8193, 65536, 65537, 100_000, 1024 * 1024):
    LENGTHS.add(f"a body of {size}", post(body=b"x" * size))
    LENGTHS.add(f"a body of {size}, unread", post("/unread", body=b"x" * size))
LENGTHS.add("a body of 100000 for Flask", post("/flask/echo", body=b"x" * 100_000))
LENGTHS.add("a body read twice", post("/twice", body="12345"))
LENGTHS.add("a body streamed back", post("/stream", body="12345"))
LENGTHS.add("a body for a 404", post("/nowhere", body="12345"))
LENGTHS.add("a body for a 405", post("/text", body="12345"))

# Transfer-Encoding, and both

_CODINGS = {
    "chunked": ["chunked"], "Chunked": ["Chunked"], "CHUNKED ": ["CHUNKED "], "tab chunked": ["\tchunked"],
    "gzip, chunked": ["gzip, chunked"], "gzip,chunked": ["gzip,chunked"], "chunked, gzip": ["chunked, gzip"],
    "gzip": ["gzip"], "deflate": ["deflate"], "identity": ["identity"], "identity, chunked": ["identity, chunked"],
    "chunked, identity": ["chunked, identity"], "chunked, chunked": ["chunked, chunked"], "magic": ["magic"],
    "magic, chunked": ["magic, chunked"], "chunked;q=1": ["chunked;q=1"], "empty": [""], "comma": [","],
    "chunked,": ["chunked,"], ", chunked": [", chunked"], "quoted": ['"chunked"'], "xchunked": ["xchunked"],
    "chunkedx": ["chunkedx"], "vertical tab": ["\x0bchunked"], "vertical tab behind": ["chunked\x0b"],
    "NUL": ["chunked\0"], "no-break space": ["\xa0chunked"], "kelvin": ["chun\xe2\x84\xaaed"], "chunk ed": ["chunk ed"],
    "twice": ["chunked", "chunked"], "identity then chunked": ["identity", "chunked"],
    "chunked then identity": ["chunked", "identity"], "gzip then chunked": ["gzip", "chunked"], "null": ["null"],
}  # fmt: skip
for name, codings in _CODINGS.items():
    fields = [f"Transfer-Encoding: {coding}" for coding in codings]
    CODINGS.add(f"Transfer-Encoding {name}", sent("/echo", *fields, body=chunks("12345")), half_close=True)
    CODINGS.add(
        f"Transfer-Encoding {name}, with a length",
        sent("/echo", "Content-Length: 5", *fields, body=chunks("1")),
        half_close=True,
    )
CODINGS.add("Transfer_Encoding", sent("/echo", "Transfer_Encoding: chunked", body=chunks("1")), half_close=True)
CODINGS.add(
    "Transfer_Encoding and a length", sent("/echo", "Transfer_Encoding: chunked", "Content-Length: 3", body="123")
)
CODINGS.add("Transfer-Encoding with a space", sent("/echo", "Transfer-Encoding : chunked", body=chunks("1")))
CODINGS.add("Transfer-Encoding folded", sent("/echo", "Transfer-Encoding:\r\n chunked", body=chunks("1")))
CODINGS.add("Transfer.Encoding", sent("/echo", "Transfer.Encoding: chunked", body=chunks("1")), half_close=True)
CODINGS.add("X-Transfer-Encoding", sent("/echo", "X-Transfer-Encoding: chunked", body=chunks("1")), half_close=True)
CODINGS.add(
    "CL.TE", sent("/echo", "Content-Length: 6", "Transfer-Encoding: chunked", body="0\r\n\r\nG"), half_close=True
)
CODINGS.add(
    "TE.CL", sent("/echo", "Transfer-Encoding: chunked", "Content-Length: 4", body=b"5c\r\n" + get()), half_close=True
)
CODINGS.add("CL.0", sent("/unread", "Content-Length: 44", body=get("/nowhere", "X: y")), half_close=True)
CODINGS.add("TE behind a CR", sent("/echo", "X: a\rTransfer-Encoding: chunked", "Content-Length: 1", body="1"))
CODINGS.add("TE behind an LF", sent("/echo", "X: a\nTransfer-Encoding: chunked", "Content-Length: 1", body="1"))
CODINGS.add("GET chunked", sent("/body", "Transfer-Encoding: chunked", body=chunks("123"), method="GET"))
CODINGS.add("GET chunked, unread", sent("/environ", "Transfer-Encoding: chunked", body=chunks("123"), method="GET"))

# Chunks

_GOOD = {
    "none": "0\r\n\r\n",
    "one": chunks("12345"),
    "many": chunks(*"12345"),
    "upper case hex": "A\r\n0123456789\r\n0\r\n\r\n",
    "lower case hex": "a\r\n0123456789\r\n0\r\n\r\n",
    "leading zeros": "0005\r\n12345\r\n0\r\n\r\n",
    "many leading zeros": "0" * 200 + "5\r\n12345\r\n0\r\n\r\n",
    "zeros at the end": "5\r\n12345\r\n000\r\n\r\n",
    "an extension": "5;a=b\r\n12345\r\n0\r\n\r\n",
    "a quoted extension": '5;a="b;c"\r\n12345\r\n0\r\n\r\n',
    "a bare extension": "5;a\r\n12345\r\n0;b\r\n\r\n",
    "spaces around an extension": "5 ; a = b\r\n12345\r\n0\r\n\r\n",
    "a trailer": "1\r\n1\r\n0\r\nX-Trailer: t\r\n\r\n",
    "trailers": "1\r\n1\r\n0\r\nX-A: t\r\nX-B: u\r\n\r\n",
    "a trailer with underscore": "1\r\n1\r\n0\r\nX_A: t\r\n\r\n",
    "CR LF in the data": chunks("\r\n0\r\n\r\n"),
    "large": chunks(b"x" * 70_000, b"y" * 10),
    "every size": chunks(*(b"x" * size for size in range(1, 40))),
}
_BAD = {
    "an empty size": "\r\n12345\r\n0\r\n\r\n",
    "only an extension": ";a\r\n12345\r\n0\r\n\r\n",
    "a word": "five\r\n12345\r\n0\r\n\r\n",
    "negative": "-5\r\n12345\r\n0\r\n\r\n",
    "plus": "+5\r\n12345\r\n0\r\n\r\n",
    "0x": "0x5\r\n12345\r\n0\r\n\r\n",
    "underscore": "1_0\r\n12345\r\n0\r\n\r\n",
    "space before": " 5\r\n12345\r\n0\r\n\r\n",
    "space behind": "5 \r\n12345\r\n0\r\n\r\n",
    "tab behind": "5\t\r\n12345\r\n0\r\n\r\n",
    "two sizes": "5 5\r\n12345\r\n0\r\n\r\n",
    "a comma": "5,\r\n12345\r\n0\r\n\r\n",
    "NUL": "5\0\r\n12345\r\n0\r\n\r\n",
    "LF for an end": "5\n12345\r\n0\r\n\r\n",
    "CR for an end": "5\r12345\r\n0\r\n\r\n",
    "CR in an extension": "5;a\rb\r\n12345\r\n0\r\n\r\n",
    "LF in an extension": "5;a\nb\r\n12345\r\n0\r\n\r\n",
    "a bad extension": "5;a b\r\n12345\r\n0\r\n\r\n",
    "an open quote": '5;a="b\r\n12345\r\n0\r\n\r\n',
    "data too short": "5\r\n1234\r\n0\r\n\r\n",
    "data too long": "5\r\n123456\r\n0\r\n\r\n",
    "LF behind the data": "5\r\n12345\n0\r\n\r\n",
    "nothing behind the data": "5\r\n123450\r\n\r\n",
    "16 digits": "FFFFFFFFFFFFFFFF\r\n12345\r\n0\r\n\r\n",
    "17 digits": "10000000000000005\r\n12345\r\n0\r\n\r\n",
    "9000 digits": "5" * 9000 + "\r\n",
    "an extension of 9000": "5;a=" + "b" * 9000 + "\r\n12345\r\n0\r\n\r\n",
    "a size without an end": "5" * 20_000,
    "cut in a size": "5",
    "cut in the data": "5\r\n123",
    "cut behind the data": "5\r\n12345",
    "cut before the last": "5\r\n12345\r\n",
    "cut in the last": "5\r\n12345\r\n0\r\n",
    "cut in a trailer": "5\r\n12345\r\n0\r\nX-A: t\r\n",
    "nothing at all": "",
    "no last line": "5\r\n12345\r\n0\r\nX",
    "a trailer with a space": "1\r\n1\r\n0\r\nX A: t\r\n\r\n",
    "a trailer without a colon": "1\r\n1\r\n0\r\nX\r\n\r\n",
    "a folded trailer": "1\r\n1\r\n0\r\nX: a\r\n b\r\n\r\n",
    "a trailer with an LF": "1\r\n1\r\n0\r\nX: a\nY: b\r\n\r\n",
    "a trailer Content-Length": "1\r\n1\r\n0\r\nContent-Length: 3\r\n\r\n",
    "a trailer Host": "1\r\n1\r\n0\r\nHost: b\r\n\r\n",
    "a trailer Transfer-Encoding": "1\r\n1\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a trailer Authorization": "1\r\n1\r\n0\r\nAuthorization: x\r\n\r\n",
    "120 trailers": "1\r\n1\r\n0\r\n" + "X: y\r\n" * 120 + "\r\n",
    "a trailer of 9000": "1\r\n1\r\n0\r\nX: " + "y" * 9000 + "\r\n\r\n",
}
for name, body in {**_GOOD, **_BAD}.items():
    CHUNKS.add(f"chunks: {name}", chunked(body), half_close=True)
    CHUNKS.add(f"chunks, unread: {name}", chunked(body, target="/unread"), half_close=True)
for name in ("one", "a trailer", "negative", "cut in the data"):
    body = {**_GOOD, **_BAD}[name]
    CHUNKS.add(f"chunks for Flask: {name}", chunked(body, target="/flask/echo"), half_close=True)
    CHUNKS.add(f"chunks for a 404: {name}", chunked(body, target="/nowhere"), half_close=True)
CHUNKS.add("chunks, then a request", chunked(chunks("1")) + get(), answers=2)
CHUNKS.add("chunks, kept alive", chunked(chunks("1")))
CHUNKS.add("chunks unread, then a request", chunked(chunks("1"), target="/unread") + get(), answers=2)
CHUNKS.add("bad chunks unread, then a request", chunked("Z\r\n\r\n", target="/unread") + get(), half_close=True)
CHUNKS.add("bad chunks, then a request", chunked(b"Z\r\n\r\n" + get()), half_close=True)
CHUNKS.add("a chunk with a request in it", chunked(chunks(get("/nowhere"))))

# What an application may do with `wsgi.input`

_BODIES = {
    "nothing": "", "a letter": "x", "five": "12345", "lines": "one\ntwo\r\nthree", "ends of lines": "\n\n\r\n",
    "a last line": "one\n", "a long line": "x" * 3000 + "\n" + "y" * 2000,
}  # fmt: skip
_WAYS = (
    "in-fives",
    "lines",
    "short-lines",
    "readlines",
    "iterates",
    "mixed",
    "sizes",
    "into",
    "while-answering",
    "read-some",
    "negative",
    "next",
)
for way in _WAYS:
    for name, text in _BODIES.items():
        READING.add(f"{way}: {name}", post(f"/{way}", body=text))
        READING.add(f"{way}: {name}, in chunks", chunked(chunks(*[text] if text else []), target=f"/{way}"))
    READING.add(f"{way}: too short", sent(f"/{way}", "Content-Length: 9", body="12\n45"), half_close=True)
    READING.add(f"{way}: no length", sent(f"/{way}"))
    READING.add(f"{way}: bad chunks", chunked("3\r\na\nb\r\nZ\r\n", target=f"/{way}"), half_close=True)
    READING.add(f"{way}: then a request", post(f"/{way}", body="a\nb") + get("/echo"), answers=2)
READING.add("wrong sizes", post("/wrong-size", body="12345"))

# JSON

_TEXTS = (
    "{}",
    "[1]",
    " null ",
    '"\xc3\xa9"',
    '"\xff"',
    "NaN",
    "1e999",
    '{"a":1,"a":2}',
    "",
    "\xef\xbb\xbf{}",
    '"\\ud800"',
    "{",
)
for text in _TEXTS:
    JSON.add(f"JSON {text!r}", post("/json", body=text))
