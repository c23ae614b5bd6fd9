-- Move full pages of a request to where other requests find them, and list them for this one.
-- Returns how many are shared from the first one given, without a gap. Repeating it is harmless.
-- KEYS: the request's list, use times, then for each page: its keys in all groups as the request's
-- own, then as shared ones.
-- ARGV: number of the first page, groups, ms to live, bytes of a page in each group, digests.
local first, groups, ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local function is_full(key, group)
  return redis.pcall('STRLEN', key) == tonumber(ARGV[3 + group])
end
local time = redis.call('TIME')
local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
local listed = redis.call('STRLEN', KEYS[1])
local done = 0
for page = 1, #ARGV - 3 - groups do
  local number, digest = first + page - 1, ARGV[3 + groups + page]
  if number * #digest >= listed then
    local own = 2 + (page - 1) * 2 * groups
    for group = 1, groups do
      if not is_full(KEYS[own + group], group) then
        return done
      end
    end
    for group = 1, groups do
      local key = KEYS[own + groups + group]
      if is_full(key, group) then
        redis.call('UNLINK', KEYS[own + group])  -- of the same tokens, so of the same bytes
      else
        redis.call('RENAME', KEYS[own + group], key)
      end
      redis.call('PEXPIRE', key, ttl_ms)
    end
    redis.call('SETRANGE', KEYS[1], number * #digest, digest)
    redis.call('PEXPIRE', KEYS[1], ttl_ms)
    redis.call('ZADD', KEYS[2], string.format('%.0f', now_us - number), digest)
    redis.call('PEXPIRE', KEYS[2], ttl_ms)
  end
  done = page
end
return done
