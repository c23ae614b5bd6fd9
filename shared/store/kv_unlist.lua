-- Shorten a request's list of shared pages to the first ones.
-- KEYS: the list. ARGV: bytes to keep.
local keep = tonumber(ARGV[1])
local length = redis.pcall('STRLEN', KEYS[1])
if type(length) == 'table' or keep == 0 then
  redis.call('DEL', KEYS[1])
elseif length > keep then
  redis.call('SET', KEYS[1], redis.call('GETRANGE', KEYS[1], 0, keep - 1), 'KEEPTTL')
end
return 1
