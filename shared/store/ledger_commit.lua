-- Commit the token of one position; the first writer wins.
-- KEYS: ledger, events.
-- ARGV: epoch, position, token id, finish reason or '', ms to live while running, and after the end.
local row = redis.call('HMGET', KEYS[1], 'epoch', 'committed', 'finish_reason', 'num_prompt', 'num_cached')
if not row[1] then
  return {'unknown'}
end
if row[1] ~= ARGV[1] then
  return {'fenced', row[1]}
end
local committed, num_prompt, position = tonumber(row[2]), tonumber(row[4]), tonumber(ARGV[2])
local event_id = ARGV[2] .. '-0'
if position == committed and position >= num_prompt then
  local won = redis.call('XRANGE', KEYS[2], event_id, event_id)
  if #won == 0 then
    return {'damaged'}
  end
  return {'already', won[1][2][2], row[3]}
end
if position <= committed then
  return {'stale'}
end
if row[3] ~= '' then
  return {'finished', row[3]}
end
if position ~= committed + 1 then
  return {'gap', row[2]}
end

if position == num_prompt then
  redis.call('XADD', KEYS[2], event_id, 't', ARGV[3])
elseif not redis.call('XADD', KEYS[2], 'NOMKSTREAM', event_id, 't', ARGV[3]) then
  return {'damaged'}  -- the tokens before this one were lost
end
if ARGV[4] ~= '' then
  redis.call('XADD', KEYS[2], ARGV[2] .. '-1', 'reason', ARGV[4], 'error', '',
    'num_prompt', row[4], 'num_generated', position + 1 - num_prompt,
    'num_cached', row[5] or '0')
  redis.call('HSET', KEYS[1], 'committed', ARGV[2], 'finish_reason', ARGV[4])
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
  redis.call('PEXPIRE', KEYS[2], ARGV[6])
else
  redis.call('HSET', KEYS[1], 'committed', ARGV[2])
  -- Not at every token: two commands more would double the work of a commit.
  if position == num_prompt or position % 256 == 0 then
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
    redis.call('PEXPIRE', KEYS[2], ARGV[5])
  end
end
return {'committed'}
