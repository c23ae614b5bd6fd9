-- List, for a request, the shared pages of its prompt that every group has, and mark them as used.
-- Returns how many there are from the first one given, without a gap.
-- KEYS: the request's list, use times, then the pages: all groups of one page, of the next, ...
-- ARGV: number of the first page, groups, ms to live, then the digest of each page.
local first, groups, ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
if first == 0 then
  redis.call('DEL', KEYS[1])
end
local time = redis.call('TIME')
local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
local found = 0
for page = 1, #ARGV - 3 do
  local is_whole = true
  for group = 1, groups do
    if redis.call('PEXPIRE', KEYS[2 + (page - 1) * groups + group], ttl_ms) == 0 then
      is_whole = false
      break
    end
  end
  if not is_whole then
    break
  end
  local number = first + page - 1
  -- Without the pages before it a page is of no use: of one prompt the last ones go first.
  redis.call('ZADD', KEYS[2], string.format('%.0f', now_us - number), ARGV[3 + page])
  redis.call('SETRANGE', KEYS[1], number * #ARGV[3 + page], ARGV[3 + page])
  found = page
end
if found > 0 then
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  redis.call('PEXPIRE', KEYS[2], ttl_ms)
end
return found
