#!/bin/sh
tr 'A-Z' 'a-z' < /home/user/work/text.txt | grep -o '[a-z][a-z]*' | sort -u | wc -l > /home/user/work/answer.txt
