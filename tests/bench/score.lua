-- wrk: POST one body over and over, and leave what was measured as JSON in a file.
wrk.method = "POST"
wrk.body = os.getenv("BENCH_BODY")
wrk.headers["Content-Type"] = "application/json"

function done(summary, latency, requests)
  local errors = summary.errors
  local file = assert(io.open(os.getenv("BENCH_RESULT"), "w"))
  file:write(string.format(
    '{"requests": %d, "us": %d, "p50_us": %d, "p99_us": %d, "refused": %d, "broken": %d}',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
  file:close()
end
