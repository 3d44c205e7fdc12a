#!/bin/bash
# Half of the reward for the words, and half for their order.
words=0 order=0
[ "$(sort sorted.txt | tr '\n' ' ')" = "apple fig pear " ] && words=1
[ "$(tr '\n' ' ' < sorted.txt)" = "$(cat /tests/expected) " ] && order=1
echo "words $words, order $order"
echo "{\"reward\": 0.$((5 * words * (1 - order)))}" > /logs/verifier/reward.json
[ $order = 1 ] && echo '{"reward": 1.0}' > /logs/verifier/reward.json
exit 0
