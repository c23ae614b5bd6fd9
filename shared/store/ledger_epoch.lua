-- Move a request that still runs to a new epoch. Returns the epoch it has then, or nil.
-- KEYS: ledger. ARGV: expected epoch, new epoch, ms to live while running.
local row = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason')
if not row[1] then
  return false
end
if row[1] == ARGV[1] and row[2] == '' then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return tonumber(ARGV[2])
end
return tonumber(row[1])
