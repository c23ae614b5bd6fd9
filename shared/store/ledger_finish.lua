-- End a request that still runs. Returns 1 when this call ended it, else 0.
-- KEYS: ledger, events. ARGV: reason, error, ms to live after the end.
local row = redis.call('HMGET', KEYS[1], 'committed', 'finish_reason', 'num_prompt')
if not row[1] or row[2] ~= '' then
  return 0
end
redis.call('XADD', KEYS[2], row[1] .. '-1', 'reason', ARGV[1], 'error', ARGV[2],
  'num_prompt', row[3], 'num_generated', tonumber(row[1]) + 1 - tonumber(row[3]))
redis.call('HSET', KEYS[1], 'finish_reason', ARGV[1], 'error', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
