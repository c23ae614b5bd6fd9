-- End a request that still runs. Returns 1 when this call ended it, else 0.
-- KEYS: ledger, events. ARGV: reason, error, ms to live after the end, code of the error.
local row = redis.pcall('HMGET', KEYS[1], 'committed', 'finish_reason', 'num_prompt', 'num_cached')
if row.err or not row[1] or row[2] ~= '' then
  return 0
end
local committed, num_prompt = tonumber(row[1]) or -1, tonumber(row[3]) or 0
local final = {'reason', ARGV[1], 'error', ARGV[2],
  'num_prompt', num_prompt, 'num_generated', committed + 1 - num_prompt,
  'num_cached', tonumber(row[4]) or 0, 'code', ARGV[4]}
local added = redis.pcall('XADD', KEYS[2], committed .. '-1', unpack(final))
if type(added) == 'table' and added.err then
  if string.find(tostring(added.err), 'OOM') then
    return added
  end
  -- No stream any more, or one with a garbled end: its reader hears of the end all the same.
  redis.call('DEL', KEYS[2])
  redis.call('XADD', KEYS[2], '*', unpack(final))
end
redis.call('HSET', KEYS[1], 'finish_reason', ARGV[1], 'error', ARGV[2], 'error_code', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
