#!/bin/sh
mkdir -p /logs/verifier
said=$(head -c 100 /home/user/work/answer.txt 2>&1 | tr -d '[:space:]')
echo "the answer was: $said; the text has 23 different words"
if [ "$said" = "23" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
