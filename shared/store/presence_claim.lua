-- Give a worker its layer groups, counting only live workers. Returns the groups it holds: "0,3".
-- KEYS: claims, the worker's presence.
-- ARGV: 'claim', 'adopt', 'move' or 'yield', worker id, prefix of presence keys, ms to live, presence, memory in
-- bytes (0: no limit), groups it insists on, or offers to yield ("0,3" or ''), then the bytes of each
-- group.
local mode, worker_id = ARGV[1], ARGV[2]
local memory, num_groups = tonumber(ARGV[6]), #ARGV - 7
local coverage = {}
for group = 0, num_groups - 1 do
  coverage[group] = 0
end
local function is_claim(text)
  for group in string.gmatch(text, '[^,]+') do
    if not coverage[tonumber(group)] then
      return false
    end
  end
  return true
end
local held = ''
local claims = redis.pcall('HGETALL', KEYS[1])
if claims.err then
  redis.call('DEL', KEYS[1])  -- no hash any more: workers claim again with their next heartbeat
  claims = {}
end
for i = 1, #claims, 2 do
  if not is_claim(claims[i + 1]) then
    redis.call('HDEL', KEYS[1], claims[i])
  elseif claims[i] == worker_id then
    held = claims[i + 1]
  elseif redis.call('EXISTS', ARGV[3] .. claims[i]) == 1 then
    for group in string.gmatch(claims[i + 1], '%d+') do
      coverage[tonumber(group)] = coverage[tonumber(group)] + 1
    end
  else
    redis.call('HDEL', KEYS[1], claims[i])
  end
end

if mode ~= 'claim' and (held == '' or redis.call('EXISTS', KEYS[2]) == 0) then
  return ''
end

if mode == 'move' then
  for group in string.gmatch(held, '%d+') do
    if coverage[tonumber(group)] == 0 then
      return held
    end
  end
  for group = 0, num_groups - 1 do
    local fits = memory == 0 or tonumber(ARGV[8 + group]) <= memory
    if coverage[group] == 0 and fits then
      redis.call('HSET', KEYS[1], worker_id, group)
      return tostring(group)
    end
  end
  return held
end

if mode == 'yield' then
  local kept, offered = {}, ',' .. ARGV[7] .. ','
  local num_held = select(2, string.gsub(held, '%d+', ''))
  local num_yielded = 0
  for group in string.gmatch(held, '%d+') do
    local wanted = string.find(offered, ',' .. group .. ',', 1, true)
    if wanted and coverage[tonumber(group)] > 0 and num_yielded < num_held - 1 then
      num_yielded = num_yielded + 1
    else
      kept[#kept + 1] = group
    end
  end
  held = table.concat(kept, ',')
  redis.call('HSET', KEYS[1], worker_id, held)
  return held
end

if mode == 'adopt' then
  for group in string.gmatch(held, '%d+') do
    coverage[tonumber(group)] = coverage[tonumber(group)] + 1
    memory = memory - tonumber(ARGV[8 + group])
  end
  for group = 0, num_groups - 1 do
    local bytes = tonumber(ARGV[8 + group])
    if coverage[group] == 0 and (ARGV[6] == '0' or bytes <= memory) then
      held = held .. ',' .. group
      memory = memory - bytes
    end
  end
  redis.call('HSET', KEYS[1], worker_id, held)
  return held
end

if ARGV[7] ~= '' then
  held = ARGV[7]
elseif held == '' then
  local best = -1
  for group = 0, num_groups - 1 do
    local fits = memory == 0 or tonumber(ARGV[8 + group]) <= memory
    if fits and (best < 0 or coverage[group] < coverage[best]) then
      best = group
    end
  end
  if best < 0 then
    return ''
  end
  held = tostring(best)
end
redis.call('HSET', KEYS[1], worker_id, held)
redis.call('SET', KEYS[2], ARGV[5], 'PX', ARGV[4])
return held
