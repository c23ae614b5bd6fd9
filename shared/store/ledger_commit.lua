-- Commit the tokens of consecutive positions, all or none; the first writer wins.
-- KEYS: ledger, events.
-- ARGV: epoch, first position, finish reason or '', ms to live while running, and after the end,
-- how many tokens, their ids, and, if the request asked for them, the log probabilities of each.
-- `first` of a record is where its last commit began: what comes again begins there.
local row = redis.call('HMGET', KEYS[1], 'epoch', 'committed', 'finish_reason', 'num_prompt', 'first',
  'num_cached')
if not row[1] then
  return {'unknown'}
end
if row[1] ~= ARGV[1] then
  return {'fenced', row[1]}
end
local committed, num_prompt, position = tonumber(row[2]), tonumber(row[4]), tonumber(ARGV[2])
if position <= committed and position >= num_prompt and position == tonumber(row[5] or row[2]) then
  local won = redis.call('XRANGE', KEYS[2], ARGV[2] .. '-0', row[2] .. '-0')
  if #won ~= committed - position + 1 then
    return {'damaged'}
  end
  local reply = {'already', row[3]}
  for i = 1, #won do
    reply[i + 2] = won[i][2][2]
  end
  return reply
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

local count = tonumber(ARGV[6])
local last, renews = position + count - 1, position == num_prompt
for i = 7, 6 + count do
  local now = position + i - 7
  local entry = {now .. '-0', 't', ARGV[i]}
  if ARGV[i + count] then
    entry[4], entry[5] = 'l', ARGV[i + count]
  end
  if now == num_prompt then
    redis.call('XADD', KEYS[2], unpack(entry))
  elseif not redis.call('XADD', KEYS[2], 'NOMKSTREAM', unpack(entry)) then
    return {'damaged'}  -- the tokens before this one were lost; the stream is still missing
  end
  renews = renews or now % 256 == 0
end
if ARGV[3] ~= '' then
  redis.call('XADD', KEYS[2], last .. '-1', 'reason', ARGV[3], 'error', '',
    'num_prompt', row[4], 'num_generated', last + 1 - num_prompt,
    'num_cached', row[6] or '0')
  redis.call('HSET', KEYS[1], 'committed', last, 'first', ARGV[2], 'finish_reason', ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
else
  redis.call('HSET', KEYS[1], 'committed', last, 'first', ARGV[2])
  -- Not at every token: two commands more would double the work of a commit.
  if renews then
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
    redis.call('PEXPIRE', KEYS[2], ARGV[4])
  end
end
return {'committed'}
