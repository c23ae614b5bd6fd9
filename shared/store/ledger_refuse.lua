-- End a request that was never admitted, so that whoever waits for it hears why.
-- KEYS: ledger, events. ARGV: reason, error, ms to live, code of the error, the field at fault, then
-- field, value, ... of its record.
-- Returns 1 when written, 0 when the request is known.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('XADD', KEYS[2], '0-1', 'reason', ARGV[1], 'error', ARGV[2],
  'num_prompt', 0, 'num_generated', 0, 'code', ARGV[4], 'param', ARGV[5])
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
