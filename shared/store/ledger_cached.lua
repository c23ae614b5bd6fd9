-- Note how many positions of a request's prompt were shared. KEYS: ledger. ARGV: how many.
if redis.call('HEXISTS', KEYS[1], 'num_prompt') == 1 then
  redis.call('HSET', KEYS[1], 'num_cached', ARGV[1])
end
return 1
