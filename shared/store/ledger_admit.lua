-- Write a request's record unless it has one. Returns 1 when written, 0 when it exists, -1 when
-- only its events do. KEYS: ledger, events. ARGV: time to live in ms, then field, value, ...
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  return -1
end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
